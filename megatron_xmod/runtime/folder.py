"""One job at a time in a run's folder, and the same folder on every node."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megatron_xmod.errors import UserError

_NAME = ".job"


def claim_folder(folder: Path) -> IO | None:
    """Takes the folder for this job; every process calls it. The claim lasts until the returned file is closed.

    Raises:
        UserError: on every rank: another job has it, it can't be written, or some nodes see another folder.
    """
    file, problem = _lock(folder) if dist.get_rank() == 0 else (None, None)
    token = [f"{socket.gethostname()} {os.getpid()}", problem]
    dist.broadcast_object_list(token)
    if token[1]:
        raise UserError(token[1])
    if file:
        file.seek(0)
        file.truncate()
        file.write(token[0])
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    blind: list = [None] * dist.get_world_size()
    dist.all_gather_object(blind, socket.gethostname() if _read(folder) != token[0] else None)
    hosts = sorted({host for host in blind if host})
    if hosts:
        raise UserError(f"train.output {folder} is not the same folder on every node: {', '.join(hosts)} can't see "
                        f"what {token[0].split()[0]} wrote there. Use a path on a shared file system.")
    return file


def _lock(folder: Path) -> tuple[IO | None, str | None]:
    """The open, locked file, or what is wrong."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / _NAME, "a+")  # noqa: SIM115 - it stays open as long as the job
    except OSError as error:
        return None, f"train.output {folder} can't be written: {error.strerror}. Choose another."
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None, (f"another job is running in train.output {folder} ({_read(folder)}, host and process). Wait "
                          "for its end, or choose another train.output.")
        # A file system without locks: two jobs at once can't be noticed there.
    return file, None


def _read(folder: Path) -> str | None:
    try:
        return (folder / _NAME).read_text()
    except OSError:
        return None
