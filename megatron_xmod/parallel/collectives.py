"""Collectives of tensor parallelism that autograd understands. Each is the identity where the group is None."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        assert x.is_contiguous()
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def copy_to_tensor_parallel(x: Tensor, group) -> Tensor:
    """Passes x, the same on every rank, into sharded work: the gradient is summed over the group."""
    return x if group is None else _Copy.apply(x, group)


def reduce_from_tensor_parallel(x: Tensor, group) -> Tensor:
    """Sums partial results of sharded work over the group; the gradient passes unchanged. x is overwritten."""
    return x if group is None else _Reduce.apply(x, group)
