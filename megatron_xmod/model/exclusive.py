"""Exclusive rounds: the layers of a round share no token, so they give the same result one by one or all at once.

A token that no layer of the round has taken yet has not changed since the round began, so all routers can read it then;
and a layer changes only its own tokens.

Shapes: B batch, S sequence, R layers in the round. `owner_BS` names the layer of the round that takes a token, R for
none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def own_by_threshold(score_BSR: Tensor, last_takes_rest: bool) -> Tensor:
    """A token enters the first layer whose sigmoid(score) >= 1/2; [B, S] int64. Depends on no other token.

    Args:
        last_takes_rest: The last layer takes every token that is left, as it does in training when the round's layers
            together have places for all tokens.
    """
    enters_BSR = score_BSR.detach() >= 0
    if last_takes_rest:
        enters_BSR[..., -1] = True
    first_BS = enters_BSR.to(torch.int8).argmax(-1)
    return first_BS.masked_fill(~enters_BSR.any(-1), score_BSR.shape[-1])


def routing_losses(score_BSR: Tensor, owner_BS: Tensor, last_takes_rest: bool) -> Tensor:
    """Binary cross-entropy of the threshold rule of each layer, [R]: over the tokens still free at that layer, whether
    it took them. A last layer that takes the rest decides nothing and has none."""
    layer_R = torch.arange(score_BSR.shape[-1], device=owner_BS.device)
    free_BSR = (owner_BS.unsqueeze(-1) >= layer_R).to(score_BSR.dtype)
    target_BSR = (owner_BS.unsqueeze(-1) == layer_R).to(score_BSR.dtype)
    if last_takes_rest:
        free_BSR = free_BSR * (layer_R < layer_R.numel() - 1)
    entropy_BSR = F.binary_cross_entropy_with_logits(score_BSR, target_BSR, reduction="none")
    return (entropy_BSR * free_BSR).sum((0, 1)) / free_BSR.sum((0, 1)).clamp(min=1)
