"""Gate x delta added to selected rows, as one Triton kernel each way.

Shapes: N rows, M rows that are changed, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xmod.kernels.triton_tiles import accumulation_type, tile_for


@triton.jit
def _forward(x, index, delta, gate, y, count, width, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < count
    mask = inside[:, None] & (column < width)[None, :]
    there = tl.load(index + row, mask=inside, other=0)[:, None] * width + column[None, :]
    change = tl.load(delta + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(TYPE)
    if gate is not None:
        change *= tl.load(gate + row, mask=inside, other=0.0).to(TYPE)[:, None]
    value = tl.load(x + there, mask=mask, other=0.0).to(TYPE) + change
    tl.store(y + there, value, mask=mask)


@triton.jit
def _backward(gradient, index, delta, gate, delta_gradient, gate_gradient, count, width,
              TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < count
    mask = inside[:, None] & (column < width)[None, :]
    there = tl.load(index + row, mask=inside, other=0)[:, None] * width + column[None, :]
    here = row[:, None] * width + column[None, :]
    value = tl.load(gradient + there, mask=mask, other=0.0).to(TYPE)
    if gate is not None:
        change = tl.load(delta + here, mask=mask, other=0.0).to(TYPE)
        tl.store(gate_gradient + row, tl.sum(value * change, 1), mask=inside)
        value *= tl.load(gate + row, mask=inside, other=0.0).to(TYPE)[:, None]
    tl.store(delta_gradient + here, value, mask=mask)


class _AddGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, delta, gate):
        assert x.is_contiguous() and delta.is_contiguous() and delta.shape == (len(index), x.shape[-1])
        assert index.dtype == torch.int64 and index.is_contiguous()
        assert gate is None or gate.shape == index.shape and gate.is_contiguous()
        # No row is named twice: with as many names as rows, all are written.
        y = torch.empty_like(x) if len(index) == len(x) else x.clone()
        _launch(_forward, x, index, delta, gate, y)
        ctx.save_for_backward(index, None if gate is None else delta, gate)
        ctx.delta_dtype = delta.dtype
        return y

    @staticmethod
    def backward(ctx, gradient):
        index, delta, gate = ctx.saved_tensors
        gradient = gradient.contiguous()
        delta_gradient = gradient.new_empty(len(index), gradient.shape[-1], dtype=ctx.delta_dtype)
        gate_gradient = None if gate is None else torch.empty_like(gate)
        _launch(_backward, gradient, index, delta, gate, delta_gradient, gate_gradient)
        return gradient, None, delta_gradient, gate_gradient


def _launch(kernel, first: Tensor, index: Tensor, *tensors) -> None:
    count, width = len(index), first.shape[-1]
    tile = tile_for(width)
    if count:
        kernel[triton.cdiv(count, tile.rows),](
            first, index, *tensors, count, width, TYPE=accumulation_type(first.dtype)[1], ROWS=tile.rows,
            WIDTH=tile.width, num_warps=tile.warps)


def add_gated(x_ND: Tensor, index_M: Tensor, delta_MD: Tensor, gate_M: Tensor | None = None) -> Tensor:
    """x with gate * delta added to the rows named by the index, [N, D]; the others keep their bits. Rounds once.

    Args:
        x_ND, delta_MD: Contiguous.
        index_M: int64. No row may be named twice: nothing is added up.
        gate_M: fp32 (fp64 in an fp64 model); None adds delta as it is.
    """
    return _AddGated.apply(x_ND, index_M, delta_MD, gate_M)
