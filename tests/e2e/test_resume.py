"""A run that was stopped and resumed is the run that was not."""

import json

import pytest
import torch

from tests.e2e.conftest import losses

LAYOUTS = {
    "one process": (1, []),
    "one process, muon": (1, ["--optimizer.name", "muon", "--parallel.zero_stage", "0"]),
    "tp2 x pp2": (4, ["--parallel.tensor_parallel_size", "2", "--parallel.pipeline_parallel_size", "2"]),
    "dp2, bf16": (2, ["--train.precision", "bf16"]),
}


@pytest.mark.parametrize("processes, layout", LAYOUTS.values(), ids=LAYOUTS)
def test_same_losses_bit_for_bit(pretrain, tmp_path, processes, layout):
    how = {"launcher": "torchrun", "processes": processes} if processes > 1 else {}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    save = ["--train.save_interval", "10", "--train.eval_interval", "5"]
    whole = pretrain(*layout, *save, "--train.output", str(unbroken), **how)
    first = pretrain(*layout, *save, "--train.output", str(broken), "--train.exit_after", "10", **how)
    assert max(losses(broken)) == 10
    second = pretrain(*layout, *save, "--train.output", str(broken), **how)
    assert whole.code == first.code == second.code == 0, (whole, first, second)
    assert "resumed from" in second.output and "note:" not in second.output
    assert losses(unbroken) == losses(broken)
    assert sorted(losses(broken)) == list(range(1, 21))
    summaries = [json.loads((run / "summary.json").read_text()) for run in (unbroken, broken)]
    assert summaries[0]["validation"] == summaries[1]["validation"]
    assert [entry["step"] for entry in summaries[0]["validation"]] == [0, 5, 10, 15, 20]
    assert summaries[1]["final"]["finished"]
    for file in sorted((unbroken / "checkpoints" / "step_00000020").glob("layer_*")):
        ours = torch.load(broken / "checkpoints" / "step_00000020" / file.name, weights_only=True)
        for name, value in torch.load(file, weights_only=True).items():
            assert torch.equal(value, ours[name]), f"{file.name}: {name}"


def test_records_of_a_lost_run_are_dropped(pretrain, tmp_path):
    run = tmp_path / "run"
    assert pretrain("--train.exit_after", "4").code == 0
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 0.0}\n{"step": 6, "lo')
    assert pretrain("--train.exit_after", "3").code == 0
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6, 7] and losses(run)[5] > 1


def test_other_settings_take_effect_and_are_noted(pretrain, tmp_path):
    constant = ["--train.exit_after", "2", "--optimizer.schedule", "constant", "--optimizer.warmup_fraction", "0"]
    assert pretrain(*constant).code == 0
    again = pretrain(*constant, "--optimizer.lr", "0.01", "--train.global_batch_size", "16")
    assert again.code == 0 and "optimizer.lr is 0.001 there, 0.01 here" in again.output, again
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["lr"] for entry in entries] == [0.001, 0.001, 0.01, 0.01]
    assert [entry["tokens"] // 32 for entry in entries] == [8, 16, 32, 48]


@pytest.mark.parametrize("change", [["--parallel.zero_stage", "0"], ["--train.precision", "bf16"]], ids=lambda c: c[0])
def test_another_layout_is_refused_by_name(pretrain, change):
    assert pretrain("--train.exit_after", "1").code == 0
    refused = pretrain(*change)
    assert refused.code == 1 and f"{change[0][2:]} is" in refused.output and "Traceback" not in refused.output, refused


def test_a_finished_run_stays_as_it_is(pretrain, tmp_path):
    assert pretrain("--train.steps", "3").code == 0
    summary = (tmp_path / "run" / "summary.json").read_text()
    again = pretrain("--train.steps", "3")
    assert again.code == 0 and "nothing to do" in again.output
    assert (tmp_path / "run" / "summary.json").read_text() == summary


def test_resume_never_and_must(pretrain):
    nothing = pretrain("--train.resume", "must")
    assert nothing.code == 1 and "holds no checkpoint" in nothing.output
    assert pretrain("--train.exit_after", "1").code == 0
    refused = pretrain("--train.resume", "never")
    assert refused.code == 1 and "train.resume is never" in refused.output


def test_old_checkpoints_are_removed(pretrain, tmp_path):
    assert pretrain("--train.save_interval", "5", "--train.keep_checkpoints", "2").code == 0
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step*"))
    assert names == ["step_00000015", "step_00000020"]
