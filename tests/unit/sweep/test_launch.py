import sys

import pytest

from megatron_xmod.errors import UserError
from megatron_xmod.sweep.launch import command, config_file, error_line, machine_gpus, slot_environment


def test_commands(plan):
    made = plan()
    run, file = made.runs[0], str(config_file(made.spec, made.runs[0]))
    assert command(made.spec, run, {})[0] == sys.executable and command(made.spec, run, {})[-2:] == ["--config", file]
    two = plan(processes=2).spec
    assert ["--nproc-per-node", "2"] == command(two, run, {})[4:6]
    slurm = plan(launcher="slurm").spec
    assert command(slurm, run, {})[0] == sys.executable  # outside of a job
    inside = command(slurm, run, {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4", "XMOD_PYTHON": "box python"})
    assert inside[:5] == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=4", "box", "python"]


def test_every_slot_has_its_own_gpus(plan):
    spec = plan(processes=2, jobs=2).spec
    assert slot_environment(spec, 0, {}, ["0", "1", "2", "3"])["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert slot_environment(spec, 1, {}, ["0", "1", "2", "3"])["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(spec, 1, {}, [])
    assert slot_environment(spec, 0, {"OMP_NUM_THREADS": "3"}, [])["OMP_NUM_THREADS"] == "3"
    with pytest.raises(UserError, match="need 4 GPUs, but there are 3"):
        slot_environment(spec, 0, {}, ["0", "1", "2"])
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": "4,5"}) == ["4", "5"]
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.parametrize("lines, code, expected", [
    (["a", "[rank 1] error: no room", "torch.distributed.X failed"], 1, "no room"),
    (["error: first", "error: last", "bye"], 1, "last"),
    (["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory", "note"], 1,
     "torch.OutOfMemoryError: CUDA out of memory"),
    (["step 3", ""], -9, "killed by SIGKILL; last line: step 3"),
    ([], 2, "exit code 2; last line: it printed nothing"),
])
def test_the_line_that_says_what_went_wrong(lines, code, expected):
    assert error_line(lines, code) == expected
