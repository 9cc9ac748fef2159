"""Sweeps of toy models as whole programs: killed and started again, with a failing run, one run alone, side by side."""

import csv
import json
import os
import subprocess
import sys
import time

import pytest
import yaml

from megatron_xmod.sweep.plan import make_plan
from megatron_xmod.sweep.spec import read_spec
from megatron_xmod.train.loop import open_datasets
from tests.e2e.conftest import ROOT, TOY

TOOL = [sys.executable, "-u", str(ROOT / "tools" / "sweep.py"), "--config"]
DENSE = {"model.prefix_layers": None}


class Sweep:
    def __init__(self, folder, shard):
        self.folder, self.shard = folder, shard
        self.output = folder / "out"
        self.file = folder / "sweep.yaml"
        (folder / "toy.yaml").write_text(TOY)

    def write(self, settings=None, **keys) -> None:
        settings = {"data.paths": [self.shard], "train.eval_interval": 5, **(settings or {})}
        self.file.write_text(yaml.safe_dump({"output": str(self.output), "configs": [str(self.folder / "toy.yaml")],
                                             "settings": settings, **keys}, sort_keys=False))

    def start(self, *options: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([*TOOL, str(self.file), *options], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)

    def run(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        output, _ = process.communicate(timeout=200)
        return process.returncode, output

    def rows(self, file: str = "runs.csv") -> list[dict]:
        with open(self.output / file) as stream:
            return list(csv.DictReader(stream))

    def log(self, run: str) -> str:
        return (self.output / "runs" / run / "log.txt").read_text()


@pytest.fixture
def sweep(shard, tmp_path):
    return Sweep(tmp_path, shard)


def wait_for(process: subprocess.Popen, text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}")


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_what_was_stopped_half_way_goes_on_where_it_was(sweep, how):
    sweep.write({"train.steps": 60}, variants={"dense": DENSE, "soft": {}})
    process = sweep.start()
    wait_for(process, "[2/2 soft-seed=1234] validation at step 10")
    getattr(process, how)()
    process.communicate(timeout=60)
    finished = sweep.output / "runs" / "dense-seed=1234" / "summary.json"
    before = finished.stat().st_mtime_ns

    code, said = sweep.run()
    assert code == 0 and "2 runs, 1 to do" in said and "dense-seed=1234]" not in said, said
    assert "[2/2 soft-seed=1234] resumed from" in said and finished.stat().st_mtime_ns == before
    assert [row["status"] for row in sweep.rows()] == ["done", "done"]
    assert [row["step"] for row in sweep.rows("curves.csv") if row["run"] == "soft-seed=1234"] == [
        str(step) for step in range(0, 61, 5)]
    assert float(sweep.rows()[1]["dense_loss"]) > 0 and (sweep.output / "loss-0.png").exists()

    code, said = sweep.run()
    assert code == 0 and "2 runs, 0 to do" in said
    assert sweep.log("soft-seed=1234").count("$ ") == 2 and sweep.log("dense-seed=1234").count("$ ") == 1


def test_a_failed_run_is_marked_and_tried_again_and_does_not_stop_the_others(sweep):
    broken = {"deepspeed.zero_optimization.reduce_bucket_size": "abc"}
    sweep.write(variants={"broken": broken, "soft": {}, "exclusive": {"model.routing.mode": "exclusive"}}, jobs=2)
    code, said = sweep.run("--only", "1")
    assert code == 0 and "done" in said and not (sweep.output / "runs.csv").exists(), said
    for _ in range(2):
        code, said = sweep.run()
        assert code == 1 and "1 of 3 runs failed" in said and "Traceback" not in said, said
        assert [row["status"] for row in sweep.rows()] == ["failed", "done", "done"]
        assert sweep.rows()[0]["error"].startswith("DeepSpeed refuses reduce_bucket_size")
    assert sweep.log("broken-seed=1234").count("$ ") == 2 and sweep.log("soft-seed=1234").count("$ ") == 1

    sweep.write(variants={"broken": {}, "soft": {"optimizer.lr": 0.01},
                          "exclusive": {"model.routing.mode": "exclusive"}})
    code, said = sweep.run("--dry-run")
    assert code == 0 and "2 of 3 runs to do" in said and "optimizer.lr is 0.001 there, 0.01 here" in said
    code, said = sweep.run()
    assert code == 0 and (sweep.output / "runs" / "soft-seed=1234.old1" / "summary.json").exists(), said
    assert [row["status"] for row in sweep.rows()] == ["done"] * 3


def test_slurm_tasks_make_what_collect_reads(sweep):
    sweep.write({"train.steps": 4}, variants={"soft": {}}, processes=2, seeds=[0, 1], launcher="slurm")
    code, said = sweep.run()
    assert code == 0 and f"sbatch --array=0-1 {sweep.output / 'sweep.sbatch'}" in said
    code, said = sweep.run("--only", "0")  # outside of a job: torchrun
    assert code == 0, said
    assert "data 2" in sweep.log("soft-seed=0")
    code, said = sweep.run("--collect")
    assert code == 0 and "1 done, 1 waiting" in said
    assert "sbatch --array=1 " in sweep.run()[1]
    assert [row["status"] for row in sweep.rows()] == ["done", "waiting"]
    assert sweep.run("--only", "2")[0] == 1


def test_a_second_sweep_in_the_same_folder_is_refused(sweep):
    sweep.write({"train.steps": 300}, variants={"soft": {}})
    first = sweep.start()
    wait_for(first, "validation at step 0")
    code, said = sweep.run()
    assert code == 1 and "another sweep is running" in said
    first.terminate()
    assert "stopped by SIGTERM" in first.communicate(timeout=60)[0]


def test_all_runs_see_the_same_tokens_whatever_the_seed_and_the_length(sweep):
    """Lengths over and under one epoch, which Megatron orders differently."""
    lengths = {"short": {"train.steps": 20}, "long": {"train.steps": 200}}
    sweep.write(grid={"length": lengths}, seeds=[0, 1])
    runs = make_plan(read_spec(str(sweep.file))).runs
    sets = [open_datasets(run.config)[0] for run in runs]
    assert len(sets) == 4 and sets[0].epochs > 1
    assert all((other[i] == sets[0][i]).all() for other in sets[1:] for i in range(20 * 8))
    sweep.write({"data.seed": 5}, grid={"length": lengths})
    other = open_datasets(make_plan(read_spec(str(sweep.file))).runs[0].config)[0]
    assert any((other[i] != sets[0][i]).any() for i in range(20))


def test_a_run_killed_after_its_last_checkpoint_gets_its_summary(sweep):
    sweep.write({"train.steps": 4}, variants={"soft": {}})
    assert sweep.run()[0] == 0
    summary = sweep.output / "runs" / "soft-seed=1234" / "summary.json"
    before = json.loads(summary.read_text())["validation"]
    summary.unlink()
    started = time.time()
    assert sweep.run()[0] == 0 and summary.stat().st_mtime > started
    assert json.loads(summary.read_text())["validation"] == before
    assert sweep.rows()[0]["status"] == "done" and float(sweep.rows()[0]["seconds"]) > 0
