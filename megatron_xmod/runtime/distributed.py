"""Finding the other processes, whatever launched this one, and picking the device."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from datetime import timedelta

import torch

from megatron_xmod.config.schema import TrainConfig
from megatron_xmod.errors import UserError
from megatron_xmod.runtime.memory import keep_freed_memory
from megatron_xmod.runtime.orphans import end_with_launcher


def set_ranks(environment: MutableMapping[str, str]) -> None:
    """Fills RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    deepspeed and torchrun have set them; a task of srun finds itself in the step's variables; a process on its own is a
    world of one. (In a batch script outside of srun there is no step, so one process there is a world of one too.)
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        environment.setdefault("LOCAL_RANK", "0")
    elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        try:
            nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
            # The port follows the job, below those that the system hands out (from 32768 on Linux).
            found = {"RANK": environment["SLURM_PROCID"], "LOCAL_RANK": environment["SLURM_LOCALID"],
                     "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"], "MASTER_ADDR": first_host(nodes),
                     "MASTER_PORT": str(20000 + int(environment["SLURM_JOB_ID"]) % 12000)}
        except KeyError as missing:
            raise UserError(f"started by srun, but the variable {missing} is not set; start the processes with srun, "
                            "torchrun or deepspeed.") from None
        for name, value in found.items():
            environment.setdefault(name, value)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: "gpu[07-09,12],login" -> "gpu07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]+\])+(?=,|$)", nodelist)
    if not first:
        raise UserError(f"Slurm's list of nodes is {nodelist!r}, which names no node. Start the processes with srun.")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def pick_device(train: TrainConfig) -> str:
    """ "cuda" or "cpu"."""
    if train.device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device is cuda, but torch sees no GPU. Check the driver and the torch build, or set "
                        "train.device to cpu.")
    cuda = torch.cuda.is_available() if train.device == "auto" else train.device == "cuda"
    return "cuda" if cuda else "cpu"


def start_distributed(train: TrainConfig) -> torch.device:
    """Joins the other processes through DeepSpeed; returns this process's device."""
    set_ranks(os.environ)
    end_with_launcher()
    kind = pick_device(train)
    os.environ["DS_ACCELERATOR"] = kind
    local_rank = int(os.environ["LOCAL_RANK"])
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"this is process {local_rank} of its node, but torch sees {torch.cuda.device_count()} "
                            "GPUs. Start one process per GPU.")
        torch.cuda.set_device(local_rank)
    else:
        keep_freed_memory()
        if int(os.environ["WORLD_SIZE"]) > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # threads of several processes that fight for the cores are slower than one each
    import deepspeed  # heavy, and it reads DS_ACCELERATOR when it is imported

    assert deepspeed.accelerator.get_accelerator().device_name() == kind, "deepspeed was imported before this"

    # DeepSpeed calls what the next torch has renamed; a user can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    # Every client optimizer is "untested" to it; the parallel tests are ours.
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    if kind == "cpu":
        # It compiles an inference operator for over a minute; killed meanwhile it leaves a lock that hangs later runs.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("nccl" if kind == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False,
                                   timeout=timedelta(minutes=train.timeout_minutes))
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Drops what a library prints; what it logs as a warning still comes through."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
