"""Sparse layers stored by round, and the anchor group: the unit of the pipeline.

Source: X-MoD (arXiv 2609.34212), eq. 6-8 and 42-43.
Shapes: B batch, S sequence, K tokens kept per sequence, D width, R layers in the round.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_xmod.model.block import Block, LayerWeights, attention_update, mlp_update
from megatron_xmod.model.context import ModelContext
from megatron_xmod.model.router import (
    Router,
    Selection,
    add_to_tokens,
    attach_loss,
    gather_tokens,
    router_logits,
    routing_loss,
    select_threshold,
    select_top_k,
)
from megatron_xmod.model.statistics import GroupStatistics


class SparseRound(nn.Module):
    """Up to K consecutive sparse layers, run one by one (soft routing, as published).

    Args:
        layers: R, the layers in the round.
    """

    def __init__(self, context: ModelContext, layers: int):
        super().__init__()
        self.context = context
        self.block = Block(context, layers)
        self.router = Router(context, layers)

    def forward(self, x_BSD: Tensor, taken_BS: Tensor, statistics: GroupStatistics | None = None,
                cache=None) -> tuple[Tensor, Tensor]:
        """Runs the layers.

        Args:
            taken_BS: How often each token was selected since the last dense anchor (the bias b), as a float.

        Returns:
            x and the counts after the round.
        """
        selections: list[Selection] = []
        return self.context.maybe_recompute(self._run, x_BSD, taken_BS, selections, statistics, cache)

    def _run(self, x_BSD, taken_BS, selections, statistics, cache):
        """`selections` is filled on the first run; recomputation finds it full and never routes again."""
        first_run = not selections
        routing = self.context.config.routing
        loss = 0.0
        for i, (weights, router) in enumerate(zip(self.block.unbind(), self.router.unbind(), strict=True)):
            weight_D, bias, scale = router
            score_BS = router_logits(x_BSD, weight_D, bias) - routing.bias_scale * taken_BS
            if first_run:
                selections.append(self._select(score_BS))
            selection = selections[i]
            if selection.positions_BK.shape[1]:
                layer_cache = cache and cache.layer(self, i)
                x_BSD = self._update(x_BSD, score_BS, selection, weights, scale, layer_cache)
                taken_BS = taken_BS + _ones_at(selection, taken_BS)
            if torch.is_grad_enabled() or statistics:
                layer_loss = routing_loss(score_BS, selection)
                loss = loss + layer_loss
            if statistics and first_run:
                statistics.record(score_BS, selection, scale, layer_loss)
        if torch.is_grad_enabled() and routing.loss_coefficient > 0:
            x_BSD = attach_loss(x_BSD, routing.loss_coefficient * loss, self.context.auxiliary_scale)
        return x_BSD, taken_BS

    def _select(self, score_BS: Tensor) -> Selection:
        if self.context.routing == "threshold":
            return select_threshold(score_BS)
        return select_top_k(score_BS, score_BS.shape[1] // self.context.config.routing.K)

    def _update(self, x_BSD, score_BS, selection, weights: LayerWeights, scale, cache):
        """x with the layer's gated update on the selected tokens (eq. 6, 7)."""
        context = self.context
        x_BKD = gather_tokens(x_BSD, selection)
        start = 0 if cache is None else cache.start
        angles = context.rope(start + selection.positions_BK, start + x_BSD.shape[1], x_BSD.dtype)
        a_BKD = attention_update(x_BKD, weights, angles, context, cache)
        f_BKD = mlp_update(x_BKD + a_BKD, weights, context)
        gate_BK = score_BS.gather(1, selection.positions_BK).sigmoid()
        gate_BK1 = (gate_BK if scale is None else scale * gate_BK).unsqueeze(-1)
        if context.config.routing.gate == "ffn":
            delta_BKD = a_BKD + (gate_BK1 * f_BKD).to(x_BSD.dtype)
        else:
            delta_BKD = (gate_BK1 * (a_BKD + f_BKD)).to(x_BSD.dtype)
        return add_to_tokens(x_BSD, selection, delta_BKD)


class AnchorGroup(nn.Module):
    """Rounds of sparse layers closed by their dense anchor. Routing state lives and ends inside.

    Args:
        rounds: Sizes of the rounds.
    """

    def __init__(self, context: ModelContext, rounds: tuple[int, ...], name: str):
        super().__init__()
        self.context, self.name = context, name
        self.rounds = nn.ModuleList(SparseRound(context, layers) for layers in rounds)
        self.anchor = Block(context)

    def forward(self, x_BSD: Tensor, cache=None) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        recording = self.context.statistics is not None
        statistics = GroupStatistics(x_BSD.shape[1], self.context.config.routing.K) if recording else None
        taken_BS = torch.zeros(x_BSD.shape[:2], device=x_BSD.device,
                               dtype=torch.promote_types(x_BSD.dtype, torch.float32))
        for sparse_round in self.rounds:
            x_BSD, taken_BS = sparse_round(x_BSD, taken_BS, statistics, cache)
        if recording:
            self.context.statistics.setdefault(self.name, []).append(statistics.finish())
        return self.anchor(x_BSD, cache)


def _ones_at(selection: Selection, like_BS: Tensor) -> Tensor:
    ones = torch.ones_like(selection.positions_BK, dtype=like_BS.dtype)
    if selection.valid_BK is not None:
        ones = ones * selection.valid_BK
    return torch.zeros_like(like_BS).scatter(1, selection.positions_BK, ones)
