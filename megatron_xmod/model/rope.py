"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


class Rope:
    """Angles of rotary positions, computed once per model in float64 and kept for each device and dtype.

    Args:
        head_dim: Width E of a head, even.
        theta: Base of the frequencies.
    """

    def __init__(self, head_dim: int, theta: float):
        self.frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    def __call__(self, positions: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position, [*positions.shape, E/2]; all positions are below `length`."""
        key = (positions.device, dtype)
        if key not in self._tables or self._tables[key][0].shape[0] < length:
            rows = 1 << (length - 1).bit_length()  # decoding asks for one more each time
            angles = torch.outer(torch.arange(rows, dtype=torch.float64), self.frequencies)
            self._tables[key] = (angles.cos().to(*key), angles.sin().to(*key))
        cos, sin = self._tables[key]
        return cos[positions], sin[positions]


def rotate(x_BSHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head's first and second halves by the angles, [B or 1, S, E/2]."""
    first, second = x_BSHE.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
