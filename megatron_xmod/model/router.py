"""Which tokens enter a sparse layer. Logits, selection and gate are fp32 (fp64 in an fp64 model) and the same on every
tensor-parallel rank. The functions are pure; `Router` holds the parameters of a round's layers.

Shapes: B batch, S sequence, K tokens kept per sequence, D width, R layers in the round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_xmod.kernels import reference
from megatron_xmod.model.context import ModelContext
from megatron_xmod.parallel.tensor import new_parameter


class Selection(NamedTuple):
    """Tokens that enter a layer.

    positions_BK: In ascending order, so that plain causal attention on the compacted sequence is right.
    valid_BK: False where a sequence has fewer than K tokens and the rest is filling, at the end; None if all are true.

    Of all layers of an exclusive round at once, positions are [R, B, K], all valid.
    """

    positions_BK: Tensor
    valid_BK: Tensor | None = None


class RouterWeights(NamedTuple):
    """Of one layer; or of all layers of a round, with R in front."""

    weight: Tensor  # [D]
    bias: Tensor | None  # []
    scale: Tensor | None  # [], the residual scale


class Router(nn.Module):
    """Logit s = w.x (+ bias) of each layer of a round, and its residual scale."""

    def __init__(self, context: ModelContext, layers: int):
        super().__init__()
        config, mesh = context.config, context.mesh
        self.weight = new_parameter((layers, config.hidden_size), mesh, init_std=config.init_std)
        self.bias = new_parameter((layers,), mesh, init_value=0.0) if config.routing.router_bias else None
        self.scale = new_parameter((layers,), mesh, init_value=config.routing.residual_scale_init) \
            if config.routing.residual_scale else None

    def stacked(self) -> RouterWeights:
        """The parameters of all layers, [R, ...]."""
        return RouterWeights(self.weight, self.bias, self.scale)

    def unbind(self) -> list[RouterWeights]:
        """The parameters of each layer."""
        absent = [None] * len(self.weight)
        columns = [absent if p is None else p.unbind() for p in self.stacked()]
        return [RouterWeights(*layer) for layer in zip(*columns, strict=True)]


def router_logits(x_BSD: Tensor, weight_D: Tensor, bias: Tensor | None) -> Tensor:
    """s = w.x + bias, [B, S], in fp32 at least; of all layers of a round [B, S, R], with weight [R, D], bias [R]."""
    logits_BS = _Logits.apply(x_BSD, weight_D)
    return logits_BS if bias is None else logits_BS + bias.to(logits_BS.dtype)


class _Logits(torch.autograd.Function):
    """w.x computed in fp32; for backward it keeps x as it is, where autograd would keep an fp32 copy of all tokens."""

    @staticmethod
    def forward(ctx, x_BSD, weight_D):
        ctx.save_for_backward(x_BSD, weight_D)
        dtype = torch.promote_types(x_BSD.dtype, torch.float32)
        return F.linear(x_BSD.to(dtype), weight_D.to(dtype))

    @staticmethod
    def backward(ctx, gradient):
        x_BSD, weight = ctx.saved_tensors
        width, dtype = x_BSD.shape[-1], gradient.dtype
        gradient_NR = gradient.reshape(x_BSD.shape[:-1].numel(), -1)  # one column for a single layer
        x_gradient = gradient_NR @ weight.view(-1, width).to(dtype)
        weight_gradient = gradient_NR.mT @ x_BSD.reshape(-1, width).to(dtype)
        return x_gradient.view_as(x_BSD).to(x_BSD.dtype), weight_gradient.view_as(weight).to(weight.dtype)


def select_top_k(score_BS: Tensor, count: int, select_round: Callable = reference.select_round) -> Selection:
    """The `count` tokens of each sequence with the largest score; of equal scores, the earlier token.

    Sees the whole sequence, so a token's fate depends on later tokens.

    Args:
        select_round: The kernel; a layer that shares with no other is a round of one.
    """
    _, positions_RBK = select_round(score_BS.unsqueeze(-1), count)
    return Selection(positions_RBK[0])


def select_threshold(score_BS: Tensor) -> Selection:
    """The tokens with sigmoid(score) >= 1/2. Depends on no other token. K is the largest count of the batch."""
    entered = score_BS.detach() >= 0
    counts_B = entered.sum(-1)
    # A stable sort brings the entered tokens to the front in order; the rest is filling.
    order = entered.sort(dim=-1, descending=True, stable=True).indices[:, :int(counts_B.max())]
    valid_BK = torch.arange(order.shape[1], device=order.device) < counts_B.unsqueeze(-1)
    return Selection(order, None if bool(valid_BK.all()) else valid_BK)


def selection_mask(selection: Selection, length: int) -> Tensor:
    """[B, S] bool: the tokens that entered."""
    positions = selection.positions_BK
    entered = torch.ones_like(positions) if selection.valid_BK is None else selection.valid_BK.to(positions.dtype)
    # Added up, since filling may name a token that entered.
    return positions.new_zeros(positions.shape[0], length).scatter_add_(1, positions, entered) > 0


def flat_positions(selection: Selection, length: int) -> Tensor:
    """Row numbers of the selected tokens, filling included, in x seen as [B*S, D]; shape of the positions."""
    batch = selection.positions_BK.shape[-2]
    return selection.positions_BK + length * torch.arange(batch, device=selection.positions_BK.device).unsqueeze(-1)


def routing_loss(score_BS: Tensor, selection: Selection) -> Tensor:
    """Binary cross-entropy of the threshold rule against membership of the selected set, mean over tokens."""
    target = selection_mask(selection, score_BS.shape[1]).to(score_BS.dtype)
    return F.binary_cross_entropy_with_logits(score_BS, target)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.scale, ctx.loss_dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_full((), ctx.scale, dtype=ctx.loss_dtype), None


def attach_loss(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """x unchanged; when a gradient flows back through it, the loss gets the gradient `scale`.

    So a loss of any pipeline stage is trained without being carried to the last one.
    """
    return _AttachLoss.apply(x, loss, scale)
