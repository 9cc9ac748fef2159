"""The process groups of a run, in one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_xmod.errors import UserError


@dataclass(frozen=True)
class Mesh:
    """Where this process stands. A group is None where its size is 1, and nothing is communicated then.

    Ranks are numbered as DeepSpeed's PipeModelDataParallelTopology does: tensor ranks are neighbours (they talk most),
    then data, then pipeline.
    """

    tensor_size: int = 1
    pipeline_size: int = 1
    data_size: int = 1
    rank: int = 0
    tensor_group: Any = None
    pipeline_group: Any = None

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor_size % self.data_size

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor_size * self.data_size)


def check_world(world_size: int, tensor_size: int, pipeline_size: int) -> int:
    """The data-parallel size.

    Raises:
        UserError: if the processes can't be shared out.
    """
    model = tensor_size * pipeline_size
    if world_size % model:
        raise UserError(
            f"{world_size} processes can't be shared by parallel.tensor_parallel_size {tensor_size} x "
            f"parallel.pipeline_parallel_size {pipeline_size} = {model}. Start a multiple of {model} processes, or "
            "change these sizes.")
    return world_size // model


def build_mesh(tensor_size: int, pipeline_size: int) -> Mesh:
    """Creates the groups; every process of the initialised world must call it."""
    world = dist.get_world_size()
    data_size = check_world(world, tensor_size, pipeline_size)
    groups = {}
    for name, size, stride in (("tensor_group", tensor_size, 1),
                               ("pipeline_group", pipeline_size, tensor_size * data_size)):
        groups[name] = _own_group(world, size, stride) if size > 1 else None
    return Mesh(tensor_size, pipeline_size, data_size, dist.get_rank(), **groups)


def _own_group(world: int, size: int, stride: int) -> Any:
    """The group of this rank, of those whose members stand `stride` apart."""
    own = None
    for first in range(world):
        if first // stride % size == 0:
            ranks = [first + i * stride for i in range(size)]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own = group
    return own
