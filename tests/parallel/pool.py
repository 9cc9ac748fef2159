"""Worlds of processes that are started once and sent cases: starting eight ranks costs more than most cases do."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import socket
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

_START_SECONDS = 180
_SECONDS_FOR_OTHERS = 3  # after the first rank failed, the time that the others get to say why


class Pool:
    """`size` ranks, joined through gloo, one thread each.

    A rank that fails or a case that takes too long ends the whole pool.
    """

    def __init__(self, size: int):
        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(mine)
            self.processes.append(process)
        self.alive = True
        self._collect("start", _START_SECONDS)

    def run(self, function: str, timeout: float = 120, **arguments: Any) -> list[Any]:
        """Calls "module:function" on every rank; the results by rank.

        Raises:
            AssertionError: with the traceback of each rank that failed.
        """
        for connection in self.connections:
            connection.send((function, arguments))
        return self._collect(function, timeout)

    def _collect(self, function: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(self.connections):
            pending = [c for rank, c in enumerate(self.connections) if rank not in results and rank not in failures]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = self.connections.index(connection)
                try:
                    good, value = connection.recv()
                except EOFError:
                    good, value = False, "the process died"
                (results if good else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + _SECONDS_FOR_OTHERS)
        if len(results) == len(self.connections):
            return [results[rank] for rank in range(len(results))]
        self.close()
        silent = [r for r in range(len(self.connections)) if r not in results and r not in failures]
        report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failures.items()))
        raise AssertionError(f"{function} failed on ranks {sorted(failures)}, no answer from {silent}\n{report}")

    def close(self) -> None:
        self.alive = False
        for process in self.processes:
            process.kill()


def _work(rank: int, size: int, port: int, connection: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    import torch

    from megatron_xmod.config.schema import TrainConfig
    from megatron_xmod.runtime.distributed import start_distributed

    torch.set_num_threads(1)
    start_distributed(TrainConfig(device="cpu", timeout_minutes=2))
    connection.send((True, None))
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        module, name = function.split(":")
        try:
            connection.send((True, getattr(importlib.import_module(module), name)(**arguments)))
        except BaseException:  # noqa: BLE001 - all of it goes to the test
            connection.send((False, traceback.format_exc()))
