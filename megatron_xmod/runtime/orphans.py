"""A rank whose launcher is gone must not go on holding its GPU. Linux only; elsewhere nothing is done."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SECONDS_BETWEEN_LOOKS = 1.0
_DEEPSPEED, _TORCHRUN = "deepspeed.launcher.launch", ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_SWEEP = "sweep.py"


def end_with_launcher() -> None:
    """Sends this process SIGTERM (so it saves and ends) when the deepspeed, torchrun or sweep that started it dies.

    The kernel does it for the parent. `deepspeed` is two processes, though: the command a user sees, and the node's
    launcher, which outlives a SIGTERM to the first; so that one is watched too, and so is a sweep behind a
    launcher. A process without such a launcher is left alone: its shell may well end before it (nohup), and Slurm sees
    to its own.
    """
    if sys.platform != "linux":
        return
    launcher = os.getppid()
    words = _words(launcher)
    deepspeed = _DEEPSPEED in words
    if deepspeed or any(Path(word).name in (*_TORCHRUN, _SWEEP) for word in words):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    command = _parent(launcher)
    commands = [Path(word).name for word in _words(command)]
    if _SWEEP in commands or deepspeed and any("deepspeed" in word for word in commands):
        threading.Thread(target=_watch, args=(launcher, command), daemon=True).start()


def _watch(launcher: int, command: int) -> None:
    while _parent(launcher) == command:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)


def _parent(process: int) -> int:
    """Process id of the parent; 0 if the process is gone."""
    try:
        # The name, in brackets, may hold anything; state and parent come after it.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _words(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except OSError:
        return []
