import subprocess

import pytest

from megatron_xmod.errors import UserError
from megatron_xmod.sweep.slurm import submit_command, write_script


def script(plan, indices=(0, 1, 3), **keys) -> str:
    made = plan(seeds=[0, 1, 2, 3], launcher="slurm", **keys)
    return write_script(made, list(indices), "venv/bin/python", "tools/sweep.py").read_text()


def test_a_task_of_the_array_is_a_run(plan, tmp_path):
    text = script(plan)
    assert f'venv/bin/python -u tools/sweep.py --config {tmp_path / "sweep.yaml"} --only "$SLURM_ARRAY_TASK_ID"' in text
    assert "sbatch --array=0-1,3 " in text and "--ntasks-per-node=1\n" in text and "--nodes=1\n" in text
    assert "--signal=B:USR1@120" in text and "scontrol requeue" in text and "{" not in text.replace("${", "").replace(
        "|| {", "")
    assert subprocess.run(["bash", "-n", str(tmp_path / "out" / "sweep.sbatch")]).returncode == 0


def test_gpus_are_asked_for_unless_it_runs_on_the_cpu(plan):
    assert "--gres" not in script(plan)
    text = script(plan, settings={"train.device": "auto", "train.global_batch_size": 16}, processes=16)
    assert "--gres=gpu:8\n" in text and "--nodes=2\n" in text and "--ntasks-per-node=8\n" in text
    with pytest.raises(UserError, match="multiple of 8"):
        script(plan, settings={"train.global_batch_size": 9}, processes=9)


def test_jobs_limit_how_many_run_at_once(plan):
    assert submit_command(plan(launcher="slurm", jobs=4), [2, 3, 4, 8]).startswith("sbatch --array=2-4,8%4 ")


def test_the_script_stops_the_run_on_usr1_and_requeues_the_task(plan, tmp_path):
    """The script itself, with stand-ins for Python and scontrol."""
    made = plan(launcher="slurm")
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/bash\ntrap 'echo saved >> {tmp_path}/seen; exit 0' USR1\necho \"$@\" > {tmp_path}/seen\n"
                    "kill -USR1 $PPID\nfor i in {1..100}; do sleep 0.1; done\n")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/seen\n')
    for file in (fake, scontrol):
        file.chmod(0o755)
    path = write_script(made, [0], str(fake), "tools/sweep.py")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "5", "SLURM_JOB_ID": "42"}
    assert subprocess.run(["bash", str(path)], env=environment, timeout=30).returncode == 0
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen[0].endswith("--only 5") and seen[1:] == ["saved", "requeue 42"]
