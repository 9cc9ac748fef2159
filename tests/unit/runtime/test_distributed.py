import socket

import pytest
import torch

from megatron_xmod.config.schema import TrainConfig
from megatron_xmod.errors import UserError
from megatron_xmod.runtime.distributed import first_host, pick_device, set_ranks

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What Slurm 22.05 gave to the second of 2 tasks on 2 nodes.
SRUN = {"SLURM_JOB_ID": "40012", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
        "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_TASKS": "2"}
DEEPSPEED = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}


def ranks_of(environment: dict[str, str]) -> dict[str, str]:
    environment = dict(environment)
    set_ranks(environment)
    return {name: environment[name] for name in RANKS}


@pytest.mark.parametrize("around", [{}, SRUN, {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}],
                         ids=["deepspeed", "deepspeed inside srun", "torchrun"])
def test_what_a_launcher_has_set_stays(around):
    assert ranks_of(around | DEEPSPEED) == DEEPSPEED


def test_srun_task_reads_its_step():
    assert ranks_of(SRUN) == {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1",
                              "MASTER_PORT": "24012"}


def test_step_that_is_smaller_than_its_job():
    step = SRUN | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n[3-4]"}
    found = ranks_of(step)
    assert (found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("2", "n3")


def test_two_jobs_meet_at_different_ports():
    assert ranks_of(SRUN)["MASTER_PORT"] != ranks_of(SRUN | {"SLURM_JOB_ID": "40013"})["MASTER_PORT"]


def test_meeting_point_that_the_user_sets_wins_under_srun():
    found = ranks_of(SRUN | {"MASTER_ADDR": "ib-n1", "MASTER_PORT": "31000"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["RANK"]) == ("ib-n1", "31000", "1")


def test_variable_that_srun_did_not_set_is_named():
    with pytest.raises(UserError, match="SLURM_LOCALID"):
        ranks_of({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"})


@pytest.mark.parametrize("environment", [
    {},
    # A batch script outside srun has its own SLURM_PROCID, but no step.
    {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_PROCID": "0"},
    {"MASTER_ADDR": "gone", "MASTER_PORT": "1"},  # left in the shell by something else
], ids=["shell", "batch script", "stale variables"])
def test_process_on_its_own_is_a_world_of_one(environment):
    found = ranks_of(environment)
    assert found | {"MASTER_PORT": ""} == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ""}
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(found["MASTER_PORT"])))


@pytest.mark.parametrize(("nodelist", "host"), [
    ("n1", "n1"),
    ("n[1-3]", "n1"),
    ("login,gpu[1-2]", "login"),
    ("gpu[07-09,12],login", "gpu07"),
    ("gpu[12,07-09]", "gpu12"),
    ("a1,b[2-3]", "a1"),
    ("rack[1-2]-n[01-04]", "rack1-n01"),
    ("n[1-3]-ib,m1", "n1-ib"),
    ("dgx-a100-[001-128].cluster", "dgx-a100-001.cluster"),
])
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",n1", "n[1-3", "n[]"])
def test_broken_node_list_is_refused(nodelist):
    with pytest.raises(UserError, match="list of nodes"):
        first_host(nodelist)


def test_device():
    assert pick_device(TrainConfig(device="cpu")) == "cpu"
    assert pick_device(TrainConfig(device="auto")) == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_the_way_out():
    with pytest.raises(UserError, match="train.device to cpu"):
        pick_device(TrainConfig(device="cuda"))
