"""Signals, lost processes and full disks: the job ends quickly and what was good stays good."""

import os
import signal
import time

import pytest

from tests.e2e.conftest import losses

PIPELINE = ["--parallel.pipeline_parallel_size", "2"]
LONG = ["--train.steps", "100000", "--train.eval_batches", "0"]


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_one_rank_killed_ends_the_others(start, launcher):
    job = start(*PIPELINE, *LONG, launcher=launcher, processes=2)
    job.wait_for("step      3/")
    ranks = job.ranks()
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    ended = job.finish(timeout=30)
    assert ended.code != 0, ended
    assert time.monotonic() - killed < 30
    assert not job.ranks()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_and_ends_all(start, pretrain, tmp_path, number):
    job = start(*PIPELINE, *LONG, launcher="torchrun", processes=2)
    job.wait_for("step      3/")
    os.kill(job.ranks()[1], number)
    ended = job.finish(timeout=60)
    assert ended.code == 0, ended
    assert f"stopped at step {max(losses(tmp_path / 'run'))} of 100000: {number.name}" in ended.output
    resumed = pretrain(*PIPELINE, *LONG, "--train.exit_after", "1", launcher="torchrun", processes=2)
    assert resumed.code == 0 and "resumed from" in resumed.output, resumed


def test_sigterm_to_the_launcher_leaves_no_orphans(start, tmp_path):
    job = start(*PIPELINE, *LONG, launcher="deepspeed", processes=2)
    job.wait_for("step      3/")
    ranks = job.ranks()
    os.kill(job.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while job.ranks() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert len(ranks) == 2 and not job.ranks()
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_a_second_job_in_the_same_folder_is_refused(start, pretrain):
    job = start(*LONG)
    job.wait_for("step      3/")
    second = pretrain(*LONG)
    assert second.code == 1 and "another job is running" in second.output and "Traceback" not in second.output, second
    job.wait_for("step ")  # the first goes on


@pytest.mark.parametrize("processes, layout", [(1, []), (2, PIPELINE)], ids=["one process", "pp2"])
def test_full_disk_keeps_the_last_checkpoint(pretrain, tmp_path, processes, layout):
    how = {"launcher": "deepspeed", "processes": processes} if processes > 1 else {}
    assert pretrain(*layout, "--train.exit_after", "2", **how).code == 0
    checkpoints = tmp_path / "run" / "checkpoints"

    def files():
        return sorted(str(p) for p in checkpoints.rglob("*") if ".tmp" not in str(p.relative_to(checkpoints)))

    before = files()
    # Files may not grow beyond 64 KiB: a write fails in the middle, as on a full disk.
    full = pretrain(*layout, "--train.exit_after", "2", limit_file_bytes=64 * 1024, **how)
    assert full.code != 0, full
    assert "the checkpoint of step 4 could not be written" in full.output and "Traceback" not in full.output, full
    assert files() == before
    assert (checkpoints / "latest").read_text() == "step_00000002\n"
    good = pretrain(*layout, "--train.exit_after", "2", **how)
    assert good.code == 0 and "resumed from" in good.output, good
    assert not list(checkpoints.glob("*.tmp"))
