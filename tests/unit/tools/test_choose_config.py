import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_xmod.config.schema import ModelConfig
from megatron_xmod.errors import UserError
from megatron_xmod.scaling import fitted
from megatron_xmod.scaling.buildable import Question
from megatron_xmod.scaling.law import PUBLISHED, PUBLISHED_RMSE, XMOD

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "choose_config.py"
OPTIMA = {2048: 3.1, 4096: 5.5, 8192: 8.9, 16384: 13.8, 32768: 21.1, 65536: 31.7}
LAYERS = ("--anchor-stride", "1", "--ratio", "layers")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("choose_config", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ask(tool, capsys):
    def answer(*words, length=32768, size="556M", compute="1e20"):
        tool.main(["--compute", compute, "--seq-length", str(length), "--active-params", size, "--json", *words])
        return json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("length, K", OPTIMA.items())
def test_the_continuous_optimum_of_the_published_law(ask, length, K):
    assert ask(*LAYERS, length=length)["continuous_K"] == pytest.approx(K, abs=0.1)


@pytest.mark.parametrize("K, A, layers", [(8, 4, 161), (16, 3, 298), (16, 1, 208)])
def test_delta_of_the_papers_configurations_is_the_formula(ask, K, A, layers):
    row = next(r for r in ask("--ratio", "layers")["candidates"] if (r["K"], r["A"]) == (K, A))
    p, N, ratio = PUBLISHED, 556e6, layers / 28
    by_hand = (p["e"] - p["u"] * N ** -p["eta_N"] * (1 - ratio ** -p["rho_N"])
               + p["w"] * 32768 ** -p["eta_L"] * (K ** p["rho_L"] - 1)
               - p["z"] * (K ** p["rho_K"] - 1) * ((2 * A / (A + 1)) ** p["rho_A"] - 1))
    assert row["layers"] == layers and row["delta"] == pytest.approx(by_hand, rel=1e-12)
    assert row["interval"][0] < by_hand < row["interval"][1]


def test_the_choice_is_the_best_tested_candidate_and_can_be_built(ask):
    answer = ask()
    tested = [row for row in answer["candidates"] if row["K_tested"] and row["A_tested"]]
    assert answer["delta"] == min(row["delta"] for row in tested)
    assert answer["delta_interval"][0] < answer["delta"] < answer["delta_interval"][1]
    assert all(32768 % row["K"] == 0 and (row["A"] * row["K"]) % 1 == 0 for row in answer["candidates"])
    assert sum(row["p_best"] for row in answer["candidates"]) + answer["p_dense"] == pytest.approx(1)
    assert answer["tokens"] == pytest.approx(1e20 / answer["train_flops_per_token"])
    assert set(answer["state_bytes"]) == {"weights", "gradients", "optimizer"}
    assert {(t["K"], t["A"]) for t in answer["near_ties"]} == {
        (r["K"], r["A"]) for r in tested if 0 < r["delta"] - answer["delta"] <= PUBLISHED_RMSE}


def test_limits_bound_the_model(ask):
    answer = ask("--max-params", "2.7B")
    assert (answer["K"], answer["A"]) == (8, 4) and answer["total_params"] == 2635237376
    assert all(row["total_params"] <= 2.7e9 for row in answer["candidates"])
    assert max(row["layers"] for row in ask("--max-layers", "161")["candidates"]) <= 161
    # A = 5, K = 16 has 4 + 4 units between which a pipeline is cut; A = 1.25 has 4 + 11.
    assert min(row["A"] for row in ask("--pipeline-stages", "15")["candidates"]) == 0.5
    assert max(row["A"] for row in ask("--pipeline-stages", "15")["candidates"]) == 1.25


def small_backbone(tmp_path):
    """8 active layers, of which 1 is the prefix."""
    path = tmp_path / "small.yaml"
    path.write_text("model: {active_layers: 8, prefix_layers: 1, hidden_size: 512, head_dim: 64, ffn_size: 1536}\n")
    return "--config", str(path)


def test_the_law_is_asked_about_what_is_built(ask, tmp_path):
    deltas = {A: ask(*small_backbone(tmp_path), "--anchor-stride", A, size="165M")["delta"] for A in ("3", "4", "5")}
    assert len(set(deltas.values())) == 1 and deltas["3"] < 0
    answer = ask("--anchor-stride", "100")
    assert {row["law_A"] for row in answer["candidates"]} == {23} and answer["continuous_A"] == 23
    assert any("what is built has A = 23" in note for note in answer["notes"])
    built = ask("--anchor-stride", "23")
    assert [row["delta"] for row in answer["candidates"]] == [row["delta"] for row in built["candidates"]]
    assert ask("--anchor-stride", "4")["candidates"][0]["law_A"] == 4  # 3.8, as the paper counts


def test_each_layout_is_one_candidate(ask, tmp_path):
    rows = [row for row in ask(*small_backbone(tmp_path), size="165M")["candidates"] if row["K"] == 16]
    assert [row["A"] for row in rows if row["layers"] == 83] == [2.5]
    rows = ask()["candidates"]
    assert len({(row["K"], row["layers"]) for row in rows}) == len(rows)


def test_every_buildable_stride_is_tried(ask, tmp_path):
    answer = ask("--max-params", "1.2B", size="165M")
    assert (answer["K"], answer["A"]) == (16, 2.5) and answer["delta"] == pytest.approx(-0.2207, abs=1e-4)
    law = {"law": "xmod", **PUBLISHED, "scores": {"rmse": 0.01}, "draws": [PUBLISHED],
           "domain": {"N_act": [1e8, 1e9], "L": [1024, 65536], "K": [2, 24], "A": [1.5, 1.5]}, "stride_domain": {}}
    path = tmp_path / "law.json"
    path.write_text(json.dumps(law))
    assert {row["A"] for row in ask("--law", str(path))["candidates"]} == {1.5}
    with pytest.raises(UserError, match="no A from 1.5 to 1.5 is a multiple of 1/K"):
        ask("--law", str(path), length=3**9)


def test_an_untested_stride_does_not_license_an_untested_K(ask, tool, capsys):
    words = "--compute", "1e20", "--seq-length", "32768", "--active-params", "556M", "--anchor-stride", "8"
    answer = ask(*words[6:])
    assert answer["K"] == 16 and answer["p_best"] + answer["p_dense"] == pytest.approx(1)
    tool.main(list(words))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    marks = {(row[0], row[1]): " ".join(row[10:]) for row in rows if len(row) > 10 and row[0].isdigit()}
    assert marks["16", "8"] == "best, A not tested, A built: 7" and "K not tested" in marks["32", "8"]


def test_best_and_ties_are_always_printed(tool, ask, capsys):
    for words in ((), ("--anchor-stride", "100"), ("--max-params", "700M")):
        answer = ask(*words)
        table = tool.report(answer)
        assert table.count("near-tie") == len(answer["near_ties"]) and table.count("  best") == 1


def test_it_says_where_it_knows_nothing(ask, tool):
    inside = ask(*LAYERS)
    assert inside["inside_data"] and any("no C in it" in note for note in inside["notes"])
    assert not any("OUTSIDE" in note for note in inside["notes"]) and "(outside" not in tool.report(inside)
    for words in ({"length": 65536}, {"size": "1.65B"}):
        answer = ask(*LAYERS, **words)
        assert "(outside the law's data, see below)" in tool.report(answer).splitlines()[2]
        assert not answer["inside_data"] and any(note.startswith("OUTSIDE THE DATA") for note in answer["notes"])
    assert any("only run at N_act = 1.65e+08" in note for note in ask()["notes"])
    assert ask(size="20M", length=512)["notes"][-1].startswith("Layers, FLOPs and memory are those of")


def test_it_says_when_the_backbone_is_of_another_size(ask):
    config = "--config", str(ROOT / "examples" / "configs" / "size" / "1.65b.yaml")
    notes = ask(*config, size="165M", length=2048)["notes"]
    assert notes[-1].startswith("The backbone of --config has 1.62e+09 active parameters, but the law was asked about")
    assert not any("The backbone" in note for note in ask(*config, size="1.65B", length=2048)["notes"])


def test_dense_is_the_answer_where_nothing_gains(ask):
    answer = ask(*LAYERS, size="10M", length=512)
    assert answer["K"] is None and answer["delta"] == 0 and answer["p_dense"] > 0.5
    assert any("train dense" in note for note in answer["notes"])


def test_the_table_the_misfit_and_the_plot(tool, capsys, tmp_path):
    plot = tmp_path / "plot.png"
    tool.main(["--compute", "1e20", "--seq-length", "32768", "--active-params", "556e6", "--plot", str(plot)])
    text = capsys.readouterr().out
    assert "best: K = 16, A = 5" in text and "K 4: -0.037 (law -0.100, 2.7x)" in text
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20000


@pytest.mark.parametrize("length, size, stride, hatched, band", [
    ("32768", "165M", "5", lambda K, A: not 4 <= K <= 16, (4, 16)),
    ("32768", "165M", "1", lambda K, A: not 2 <= K <= 24, (2, 24)),
    ("32768", "556M", None, lambda K, A: A != 1 or not 2 <= K <= 24, (4, 16)),
    ("65536", "165M", None, lambda K, A: True, (4, 16)),
])
def test_the_map_hatches_what_lies_outside_the_data(tool, monkeypatch, tmp_path, length, size, stride, hatched, band):
    from megatron_xmod import plotting
    from megatron_xmod.scaling import plots
    seen = []
    monkeypatch.setattr(plots, "choice", lambda *args: seen.append(args))
    monkeypatch.setattr(plotting, "save", lambda figure, path: None)
    tool.main(["--compute", "1e20", "--seq-length", length, "--active-params", size, "--plot", str(tmp_path / "a.png"),
               *(("--anchor-stride", stride) if stride else ())])
    K, A, delta, inside, _, _, _, tested, *_ = seen[0]
    wrong = [(k, a) for i, a in enumerate(A) for j, k in enumerate(K)
             if math.isfinite(delta[i, j]) and inside[i, j] == hatched(k, a)]
    assert not wrong and tested == band


def test_a_law_from_a_file(ask, tmp_path):
    law = {"law": "xmod", **PUBLISHED, "w": 50.0, "scores": {"rmse": 0.01}, "draws": [PUBLISHED],
           "domain": {"N_act": [1e8, 1e9], "L": [1024, 65536], "K": [2, 64], "A": [1, 1]}, "stride_domain": {}}
    path = tmp_path / "law.json"
    path.write_text(json.dumps(law))
    answer = ask("--law", str(path), "--ratio", "layers")
    assert answer["A"] == 1 and answer["continuous_K"] > 1.3 * OPTIMA[32768] and "table9_misfit" not in answer
    assert answer["intervals_from"] == "bootstrap refits to its runs"
    domain = law["domain"]
    for content, words in (("{", "not JSON"), ({"loss": "mse"}, "not a law saved by .*: it has no 'law'"),
                           ([], "it holds no JSON object"), (law | {"law": "candidate"}, "its law is 'candidate'"),
                           (law | {"domain": {k: v for k, v in domain.items() if k != "K"}}, "has no 'domain.K'"),
                           (law | {"domain": domain | {"K": [2, math.nan]}}, "domain.K is .2, nan., but a range goes"),
                           (law | {"domain": domain | {"L": [4096, 2048]}}, "domain.L is .4096, 2048."),
                           (law | {"stride_domain": {"K": [0, 8]}}, "stride_domain.K is .0, 8."),
                           (law | {"draws": [PUBLISHED | {"w": math.nan}]}, "w is nan")):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(UserError, match=words):
            ask("--law", str(path))


@pytest.mark.parametrize("words, message", [
    (("--max-params", "100M"), "no K and A can be built for L = 32768: more than 1e\\+08 parameters"),
    (("--anchor-stride", "0.3"), "A = 0.3 and K = 4 give 1.2. The nearest A that work: 0.25 or 0.5"),
])
def test_what_cannot_be_built_is_refused(ask, words, message):
    with pytest.raises(UserError, match=message):
        ask(*words)


@pytest.mark.parametrize("words", [
    ("--active-params", "0"), ("--active-params", "inf"), ("--seq-length", "inf"), ("--max-layers", "inf"),
    ("--anchor-stride", "inf"), ("--anchor-stride", "-1"), ("--compute", "inf"), ("--compute", "nan"),
])
def test_what_is_no_positive_number_is_refused(ask, capsys, words):
    with pytest.raises(SystemExit):
        ask(*words)
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.endswith(f"argument {words[0]}: it is {words[1]}; it must be a finite number above 0.")


def test_a_picture_is_a_png(ask, capsys):
    with pytest.raises(SystemExit):
        ask("--plot", "x.pdf")
    assert "argument --plot: it is x.pdf; pictures are PNG" in capsys.readouterr().err


def test_a_question_is_finite():
    with pytest.raises(UserError, match="--compute is inf; it must be a finite number above 0"):
        Question(math.inf, 2048, 1e8, ModelConfig())


def test_lengths_may_be_given_in_units_of_1024(tool):
    words = "--compute", "1e20", "--active-params", "0.5K", "--seq-length"
    args = tool.parse([*words, "32k"])
    assert (args.seq_length, args.active_params) == (32768, 500)
    for wrong in ("2048.5", "32x"):
        with pytest.raises(SystemExit):
            tool.parse([*words, wrong])


def test_an_odd_length_has_few_sparsities(ask):
    assert {row["K"] for row in ask(length=3 * 1024)["candidates"]} == {2, 3, 4, 6, 8, 12, 16, 24, 32, 48}
    with pytest.raises(UserError, match="L has no divisor"):
        ask(length=4099)


def test_it_says_where_its_intervals_come_from(ask):
    answer = ask(*LAYERS)
    assert "simulated" in answer["intervals_from"] and "started at the published" in answer["intervals_from"]
    assert any(note.startswith("The interval and P(best) come from 200 refits") for note in answer["notes"])


def test_the_published_laws_draws_scatter_about_it():
    law = fitted.published_law()
    assert law.form is XMOD and len(law.draws) == 200
    mean = sum(draw["rho_N"] for draw in law.draws) / 200
    assert mean == pytest.approx(PUBLISHED["rho_N"], rel=0.05)


def test_the_command_needs_no_torch():
    code = (f"import runpy, sys; main = runpy.run_path({str(TOOL)!r})['main']; main(['--compute', '1e20', "
            "'--seq-length', '2048', '--active-params', '165M', '--json']); assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["K"] in (2, 4, 8)
    done = subprocess.run([sys.executable, str(TOOL), "--compute", "1e20", "--seq-length", "4099", "--active-params",
                           "165M"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: no K and A can be built")
