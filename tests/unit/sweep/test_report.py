from megatron_xmod.sweep.progress import Progress
from megatron_xmod.sweep.report import write_report
from megatron_xmod.sweep.state import State, read_state
from tests.unit.sweep.conftest import DENSE, leave_finished


def write(plan, **keys) -> str:
    made = plan(**keys)
    for run in made.runs:
        leave_finished(run)
    path = write_report(made, [(run, read_state(run)) for run in made.runs])
    text = path.read_text()
    for name in [word.split(")")[0] for word in text.split("](")[1:]]:
        assert (path.parent / name).exists() or name.endswith(".csv"), name
    return text


def row(text: str, name: str) -> list[str]:
    return next([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
                if line.startswith(f"| {name} "))


def test_a_comparison(plan):
    text = write(plan, variants={"dense": DENSE, "soft": {}}, seeds=[0, 1])
    cells = row(text, "soft")
    assert cells[1:3] == ["2", "15"] and cells[6].endswith("± 0.0000") and cells[9] == "-0.1000 ± 0.0000"
    assert cells[10].endswith("*") and "in the middle of its schedule" in text  # dense goes on, at equal steps
    assert row(text, "dense")[9:11] == ["", ""] and "loss-0.png" in text and "Over K" not in text


def test_with_a_budget_both_end_at_the_same_flops(plan):
    text = write(plan, variants={"dense": DENSE, "soft": {}}, budget={"flops": 1e11}, settings={"data.seq_length": 512})
    assert not row(text, "soft")[10].endswith("*") and "C 1e+11 FLOPs" in text
    assert row(text, "soft")[9].endswith("†")  # at dense's tokens it is not yet at its end


def test_a_law_sweep_has_a_picture_over_K(plan):
    text = write(plan, variants={"dense": DENSE, "x": {"model.routing.A": 1}},
                 grid={"model.routing.K": [2, 4, 8], "data.seq_length": [64, 128]})
    assert "over-K.png" in text and "loss-1.png" in text


def test_what_is_missing_is_said(plan):
    made = plan({"model.routing.A": 1}, grid={"model.routing.K": [3, 4]}, seeds=[0, 1])
    leave_finished(made.runs[0])
    path = write_report(made, [(made.runs[0], read_state(made.runs[0])), (made.runs[1], State("failed", error="oh"))])
    text = path.read_text()
    assert "1 of 2 runs are done" in text and "- K=4-seed=1: failed, oh" in text and "No dense run" in text
    assert "K=3: data.seq_length (64) must be a multiple" in text
    assert "0 of 2" in write_report(made, [(run, State("waiting")) for run in made.runs]).read_text()


def test_the_time_left_follows_the_flops(plan):
    made = plan(variants={"dense": DENSE, "soft": {}})
    said: list[str] = []
    progress = Progress(2, dict(enumerate(made.runs)), said.append)
    assert progress.seconds_left() is None
    progress.begin(0)
    progress.hear(0, "resumed from runs/x at step 10")
    progress.hear(0, "step 12/20 | loss 3")
    progress.started -= 100
    dense, soft = (run.flops_per_step for run in made.runs)
    assert abs(progress.seconds_left() / (100 * (8 * dense + 20 * soft) / (2 * dense)) - 1) < 0.01
    progress.hear(0, "validation at step 20: causal 3.0000, top-k 3.0000, gap +0.0000; the causal rule takes 0.1")
    assert said[-1].startswith("[1/2 dense-seed=1234] validation at step 20: causal") and said[-1].endswith(" left")
    progress.end(0, State("failed", error="oh"))
    assert "failed: oh; tried again" in said[-1] and len(said) == 4
