"""Asking a running job to stop: SIGTERM or SIGUSR1 -> a checkpoint and a clean end."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Remembers the signals that this process got, and agrees with the others on the step to stop at."""

    def __init__(self, device: torch.device):
        self.device = device
        self.received = 0
        for number in _SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number, frame) -> None:
        self.received = number

    def agreed(self) -> str | None:
        """The signal's name if any process got one. Every process calls it after every step."""
        flag = torch.tensor(self.received, dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return signal.Signals(int(flag)).name if flag else None
