"""The main job under each launcher, and what it leaves behind."""

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_xmod.checkpoint.weights import load_transformer
from megatron_xmod.parallel.loss import cross_entropy
from megatron_xmod.train.loop import open_datasets
from tests.e2e.conftest import ROOT, losses

LAYOUTS = {
    "torchrun, dp2, exclusive": ("torchrun", 2, ["--model.routing.mode", "exclusive"]),
    "deepspeed, pp2": ("deepspeed", 2, ["--parallel.pipeline_parallel_size", "2"]),
    "torchrun, tp2 x pp2": ("torchrun", 4, ["--parallel.tensor_parallel_size", "2",
                                            "--parallel.pipeline_parallel_size", "2"]),
}


@pytest.mark.parametrize("launcher, processes, layout", LAYOUTS.values(), ids=LAYOUTS)
def test_trains_and_leaves_a_model_that_one_process_reads(pretrain, tmp_path, launcher, processes, layout):
    finished = pretrain(*layout, "--train.steps", "40", "--train.eval_interval", "40", "--optimizer.lr", "0.01",
                        "--train.tensorboard", "true", launcher=launcher, processes=processes)
    assert finished.code == 0, finished
    run = tmp_path / "run"
    seen = losses(run)
    assert sorted(seen) == list(range(1, 41)) and seen[40] < seen[1] - 1
    entry = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert entry["tokens"] == 40 * 8 * 32
    assert {"lr", "grad_norm", "tokens_per_second", "flops_per_second", "memory_bytes"} < entry.keys()
    assert entry["routing"]["selected"] == pytest.approx(1 / 4) and 0 < entry["routing"]["coverage"] <= 1
    assert list((run / "tensorboard").glob("events*")) and (run / "config.yaml").exists()
    summary = json.loads((run / "summary.json").read_text())
    first, last = summary["validation"]
    assert (first["step"], last["step"]) == (0, 40) and last["loss_causal"] < first["loss_causal"] - 1
    _same_validation_loss(run, last)


def _same_validation_loss(run, expected):
    """The model read back by one process has the validation losses that the job reported."""
    model, config = load_transformer(run)
    _, valid_set = open_datasets(config)
    tokens = torch.stack([torch.from_numpy(valid_set[i]) for i in range(16)])
    for routing, name in (("threshold", "loss_causal"), ("top_k", "loss_topk")):
        model.context.routing = routing
        with torch.no_grad():
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], config.model.vocab_size, model.context.mesh)
        assert loss.mean().item() == pytest.approx(expected[name], abs=1e-5)


def test_tasks_of_srun_find_each_other(start):
    """Two processes with the variables that srun sets; a real cluster is in the README."""
    slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid()),
             "SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_NODELIST": "localhost"}
    jobs = [start("--train.exit_after", "2", **slurm, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"]
    finished = [job.finish(timeout=120) for job in jobs]
    assert [f.code for f in finished] == [0, 0], finished
    assert "data 2" in finished[0].output and "step" not in finished[1].output


def test_generates_from_a_checkpoint(pretrain, tmp_path):
    assert pretrain("--train.exit_after", "2").code == 0
    tool = [sys.executable, str(ROOT / "tools" / "generate.py"), "--checkpoint"]
    for place in ("run", "run/checkpoints", "run/checkpoints/step_00000002"):
        options = ["--prompt", "abc", "--seed", "1", "--max-new-tokens", "8", "--device", "cpu"]
        written = subprocess.run([*tool, str(tmp_path / place), *options], capture_output=True, text=True)
        assert written.returncode == 0 and written.stdout.startswith("abc"), written
        assert "a token passed" in written.stderr
    lost = subprocess.run([*tool, str(tmp_path)], capture_output=True, text=True)
    assert lost.returncode == 1 and "holds no checkpoint" in lost.stderr and "Traceback" not in lost.stderr
