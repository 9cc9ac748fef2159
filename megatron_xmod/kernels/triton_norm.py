"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467) of all rows, or of rows gathered by index: a Triton kernel each way.

Row m belongs to layer m // (M/R) and is scaled by that layer's weight: the tokens of a round stand stacked by layer.

Shapes: N rows to gather from, M rows that are normed, D width, R layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xmod.kernels.triton_tiles import accumulation_type, tile_for

_PROGRAMS = 1024  # of a backward: some for each multiprocessor, and few enough that their partial sums stay small


@triton.jit
def _place(index, layer, own, column, length, width):
    """Of a tile of the layer's rows: which exist, which numbers exist, their rows in all, and where x has them."""
    inside = own < length
    mask = inside[:, None] & (column < width)[None, :]
    row = layer.to(tl.int64) * length + own
    source = row
    if index is not None:
        source = tl.load(index + row, mask=inside, other=0)
    return inside, mask, row, source


@triton.jit
def _forward(x, index, weight, rows, normed, inverse_rms, length, width,
             EPS: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    layer = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, mask, row, source = _place(index, layer, own, column, length, width)
    value = tl.load(x + source[:, None] * width + column[None, :], mask=mask, other=0.0)
    here = row[:, None] * width + column[None, :]
    if rows is not None:
        tl.store(rows + here, value, mask=mask)
    value = value.to(TYPE)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / width + EPS)
    scale = tl.load(weight + layer * width + column, mask=column < width, other=0.0).to(TYPE)
    tl.store(normed + here, value * inverse[:, None] * scale[None, :], mask=mask)
    tl.store(inverse_rms + row, inverse, mask=inside)


@triton.jit
def _backward(x, index, weight, inverse_rms, rows_gradient, normed_gradient, x_gradient, weight_partial, length, width,
              TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    part, parts, layer = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    scale = tl.load(weight + layer * width + column, mask=column < width, other=0.0).to(TYPE)
    weight_sum = tl.zeros([ROWS, WIDTH], TYPE)
    for start in range(part * ROWS, length, parts * ROWS):
        own = start + tl.arange(0, ROWS)
        inside, mask, row, source = _place(index, layer, own, column, length, width)
        there = source[:, None] * width + column[None, :]
        here = row[:, None] * width + column[None, :]
        inverse = tl.load(inverse_rms + row, mask=inside, other=0.0)
        unit = tl.load(x + there, mask=mask, other=0.0).to(TYPE) * inverse[:, None]
        gradient = tl.load(normed_gradient + here, mask=mask, other=0.0).to(TYPE)
        weight_sum += gradient * unit
        gradient *= scale[None, :]
        gradient = (gradient - unit * (tl.sum(gradient * unit, 1) / width)[:, None]) * inverse[:, None]
        if rows_gradient is not None:
            gradient += tl.load(rows_gradient + here, mask=mask, other=0.0).to(TYPE)
        tl.store(x_gradient + there, gradient, mask=mask)
    place = (layer * parts + part).to(tl.int64) * width + column
    tl.store(weight_partial + place, tl.sum(weight_sum, 0), mask=column < width)


class _Norm(torch.autograd.Function):
    """(rows, normed) of x [N, D]; without an index all rows are normed, and there is no copy of them."""

    @staticmethod
    def forward(ctx, x, index, weight, eps):
        assert x.is_contiguous() and weight.is_contiguous() and weight.shape[-1] == x.shape[-1]
        total, width = len(x) if index is None else len(index), x.shape[-1]
        layers = weight.numel() // width
        assert total % layers == 0, f"{total} rows can't be those of {layers} layers"
        normed, rows = x.new_empty(total, width), None
        if index is not None:
            assert index.dtype == torch.int64 and index.is_contiguous()
            rows = torch.empty_like(normed)
        torch_type, triton_type = accumulation_type(x.dtype)
        inverse_rms = torch.empty(total, dtype=torch_type, device=x.device)
        tile, length = tile_for(width), total // layers
        if total:
            _forward[triton.cdiv(length, tile.rows), layers](
                x, index, weight, rows, normed, inverse_rms, length, width, EPS=eps, TYPE=triton_type, ROWS=tile.rows,
                WIDTH=tile.width, num_warps=tile.warps)
        ctx.save_for_backward(x, index, weight, inverse_rms)
        return rows, normed

    @staticmethod
    def backward(ctx, rows_gradient, normed_gradient):
        x, index, weight, inverse_rms = ctx.saved_tensors
        total, width = normed_gradient.shape
        layers, tile = weight.numel() // width, tile_for(width)
        length = total // layers
        # No row is named twice: with as many names as rows, all are written.
        x_gradient = torch.empty_like(x) if total == len(x) else torch.zeros_like(x)
        if not total:
            return x_gradient, None, torch.zeros_like(weight), None
        torch_type, triton_type = accumulation_type(x.dtype)
        parts = min(triton.cdiv(length, tile.rows), max(1, _PROGRAMS // layers))
        weight_partial = torch.empty(layers, parts, width, dtype=torch_type, device=x.device)
        _backward[parts, layers](
            x, index, weight, inverse_rms, None if rows_gradient is None else rows_gradient.contiguous(),
            normed_gradient.contiguous(), x_gradient, weight_partial, length, width, TYPE=triton_type, ROWS=tile.rows,
            WIDTH=tile.width, num_warps=tile.warps)
        return x_gradient, None, weight_partial.sum(1).view_as(weight).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension; weight [D], or [R, D] for x [R, ..., D]. Rounds once, at the end."""
    return _Norm.apply(x.reshape(-1, x.shape[-1]), None, weight, eps)[1].view(x.shape)


def gather_norm(x_ND: Tensor, index_M: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The rows of x named by the index, and their RMSNorm; both [M, D].

    Args:
        x_ND: Contiguous.
        index_M: int64, stacked by layer if the weight is [R, D]. No row may be named twice: backward writes the
            gradient of each without adding up.
        weight: [D] or [R, D].
    """
    return _Norm.apply(x_ND, index_M, weight, eps)
