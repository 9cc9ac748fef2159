"""Ranks as threads of this process: tensor parallelism is tested without starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_xmod.parallel.mesh import Mesh

_SECONDS = 20


class ThreadGroup:
    """Stands in for a process group. `all_reduce` takes the place of torch's."""

    def __init__(self, size: int):
        self.rank = threading.local()
        self.parts: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_SECONDS)

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None) -> None:
        assert group is self, "a collective over another group"
        assert tensor.is_contiguous()
        self.parts[self.rank.value] = tensor.detach().clone()
        self.barrier.wait()
        parts = torch.stack(self.parts)
        self.barrier.wait()
        with torch.no_grad():
            tensor.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))


def run_ranks(monkeypatch, size: int, function: Callable[[Mesh], Any]) -> list[Any]:
    """Calls function(mesh) on each of `size` tensor-parallel ranks; the results by rank."""
    group = ThreadGroup(size)
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        group.rank.value = rank
        try:
            results[rank] = function(Mesh(tensor_size=size, rank=rank, tensor_group=group))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
