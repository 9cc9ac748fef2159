"""How the row-wise Triton kernels cut their work: a tile holds whole rows, about 2048 numbers.

Shapes: M rows, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_NUMBERS = 2048  # of a tile: 16 per thread, so that loads are wide and nothing spills
_LARGEST_WIDTH = 1 << 16


class Tile(NamedTuple):
    """Rows and (padded) width of a tile, and the warps that work on it."""

    rows: int
    width: int
    warps: int


def tile_for(width: int) -> Tile:
    """The tile for rows of `width` numbers."""
    assert 0 < width <= _LARGEST_WIDTH, f"rows of {width} numbers do not fit into one program"
    padded = triton.next_power_of_2(width)
    return Tile(max(1, _NUMBERS // padded), padded, min(16, max(4, padded // 512)))


def accumulation_type(dtype: torch.dtype) -> tuple[torch.dtype, tl.dtype]:
    """What sums and products are computed in: fp32, and fp64 for fp64; as torch's and as Triton's type."""
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)
