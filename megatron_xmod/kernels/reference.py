"""The operations in plain torch: what every other implementation must equal, and what the CPU runs.

Shapes: N rows, M selected rows, B batch, S sequence, D width, K tokens kept per layer and sequence, R layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension; weight [D], or [R, D] for x [R, ..., D]."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    stacked = weight.view(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[1])
    return F.rms_norm(x, weight.shape[1:], None, eps) * stacked


def gather_norm(x_ND: Tensor, index_M: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The rows of x named by the index, and their RMSNorm, both [M, D]; rows stacked by layer if the weight is [R, D].
    """
    rows_MD = x_ND.index_select(0, index_M)
    layered = rows_MD if weight.dim() == 1 else rows_MD.unflatten(0, (weight.shape[0], -1))
    return rows_MD, rms_norm(layered, weight, eps).view_as(rows_MD)


def add_gated(x_ND: Tensor, index_M: Tensor, delta_MD: Tensor, gate_M: Tensor | None = None) -> Tensor:
    """x with gate * delta added to the rows named by the index, [N, D]; the others keep their bits.

    Args:
        gate_M: fp32 (fp64 in an fp64 model); None adds delta as it is.
    """
    change_MD = delta_MD if gate_M is None else gate_M.unsqueeze(-1) * delta_MD
    return x_ND.index_add(0, index_M, change_MD.to(x_ND.dtype))


@torch.no_grad()
def select_round(score_BSR: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each layer in turn takes the `count` tokens it scores highest among those left; of equal scores, the earlier.

    Returns:
        owner [B, S], the layer that takes a token, R for none; positions [R, B, K] in ascending order; int64.
    """
    layers = score_BSR.shape[-1]
    owner_BS = torch.full(score_BSR.shape[:2], layers, device=score_BSR.device)
    positions = []
    for layer in range(layers):
        order_BS = score_BSR[..., layer].sort(dim=-1, descending=True, stable=True).indices
        taken_BS = (owner_BS < layers).gather(1, order_BS)
        # Behind all that are left, so that a token of score -inf is still taken before one that has an owner.
        order_BS = order_BS.gather(1, taken_BS.sort(dim=-1, stable=True).indices)
        positions.append(order_BS[:, :count].sort(dim=-1).values)
        owner_BS.scatter_(1, positions[-1], layer)
    return owner_BS, torch.stack(positions)
