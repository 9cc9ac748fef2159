"""Sparse layers stored by round, and the anchor group: the unit of the pipeline.

Source: X-MoD (arXiv 2609.34212), eq. 6-8 and 42-43.
Shapes: B batch, S sequence, K tokens kept per sequence, D width, R layers in the round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron_xmod.model.block import Block, LayerWeights, attention_update, mlp_update
from megatron_xmod.model.context import ModelContext
from megatron_xmod.model.exclusive import routing_losses
from megatron_xmod.model.router import (
    Router,
    RouterWeights,
    Selection,
    attach_loss,
    flat_positions,
    router_logits,
    routing_loss,
    select_threshold,
    select_top_k,
    selection_mask,
)
from megatron_xmod.model.statistics import GroupStatistics

SELECTION = "select tokens"  # the name of routing in a profile


class SparseRound(nn.Module):
    """Up to K consecutive sparse layers.

    Args:
        layers: R, the layers in the round.
    """

    def __init__(self, context: ModelContext, layers: int):
        super().__init__()
        self.context, self.layers = context, layers
        self.block = Block(context, layers)
        self.router = Router(context, layers)
        self.exclusive = context.config.routing.mode == "exclusive"
        # Then the layers of an exclusive round have places for all tokens, and the last one takes those that are left.
        self.last_takes_rest = layers == context.config.routing.K

    def forward(self, x_BSD: Tensor, taken_BS: Tensor, statistics: GroupStatistics | None = None,
                cache=None) -> tuple[Tensor, Tensor]:
        """Runs the layers.

        Args:
            taken_BS: How often each token was selected since the last dense anchor (the bias b), as a float.

        Returns:
            x and the counts after the round.
        """
        run = self._run_soft
        if self.exclusive:
            # Under the threshold a layer takes as many tokens as pass; as one batch, all would be filled up to the
            # fullest of them.
            one_by_one = self.context.config.routing.one_by_one or self.context.routing == "threshold"
            run = self._run_one_by_one if one_by_one else self._run_batched
        choices: list = []
        return self.context.maybe_recompute(run, x_BSD, taken_BS, choices, statistics, cache)

    # Each of the three fills `choices` on its first run; recomputation finds it full and never routes again.

    def _run_soft(self, x_BSD, taken_BS, choices, statistics, cache):
        """Each layer chooses among all tokens, those taken before made less likely (eq. 7, 8)."""
        first_run = not choices
        scores = []
        for i, (weights, router) in enumerate(zip(self.block.unbind(), self.router.unbind(), strict=True)):
            score_BS = self._score(x_BSD, router, taken_BS)
            if first_run:
                choices.append(self._select(score_BS))
            selection = choices[i]
            if statistics and first_run:
                statistics.record_soft(score_BS, selection, router.scale)
            scores.append(score_BS)
            x_BSD = self._update(x_BSD, score_BS, selection, weights, router.scale, cache and cache.layer(self, i))
            taken_BS = taken_BS + selection_mask(selection, taken_BS.shape[1])
        return self._attach(x_BSD, lambda: sum(map(routing_loss, scores, choices))), taken_BS

    def _run_batched(self, x_BSD, taken_BS, choices, statistics, cache):
        """All layers of an exclusive round at once, under top-k."""
        router = self.router.stacked()
        score_BSR = self._score(x_BSD, router, taken_BS.unsqueeze(-1))
        if not choices:
            choices += self._select_round(score_BSR)
            if statistics:
                statistics.record_exclusive(score_BSR, choices[0], choices[0], router.scale, self.last_takes_rest)
        owner_BS, selection = choices
        x_BSD = self._update(x_BSD, score_BSR.permute(2, 0, 1), selection, self.block.weights(), router.scale, None)
        return self._end_exclusive(x_BSD, taken_BS, score_BSR, owner_BS)

    def _run_one_by_one(self, x_BSD, taken_BS, choices, statistics, cache):
        """The same function, layer after layer: each reads the tokens as the layers before it left them."""
        first_run = not choices
        owner_BS = torch.full(taken_BS.shape, self.layers, device=x_BSD.device)
        scores = []
        for i, (weights, router) in enumerate(zip(self.block.unbind(), self.router.unbind(), strict=True)):
            free_BS = owner_BS == self.layers
            scores.append(self._score(x_BSD, router, taken_BS))
            if first_run:
                choices.append(self._select_free(scores[i], free_BS, last=i == self.layers - 1))
            owner_BS = owner_BS.masked_fill(selection_mask(choices[i], free_BS.shape[1]), i)
            x_BSD = self._update(x_BSD, scores[i], choices[i], weights, router.scale, cache and cache.layer(self, i))
        score_BSR = torch.stack(scores, -1)
        if statistics and first_run:
            by_top_k_BS = owner_BS if self.context.routing == "top_k" else self._select_round(score_BSR)[0]
            statistics.record_exclusive(score_BSR, owner_BS, by_top_k_BS, self.router.scale, self.last_takes_rest)
        return self._end_exclusive(x_BSD, taken_BS, score_BSR, owner_BS)

    def _end_exclusive(self, x_BSD, taken_BS, score_BSR, owner_BS):
        x_BSD = self._attach(x_BSD, lambda: routing_losses(score_BSR, owner_BS, self.last_takes_rest).sum())
        return x_BSD, taken_BS + (owner_BS < self.layers)

    def _score(self, x_BSD: Tensor, router: RouterWeights, taken: Tensor) -> Tensor:
        return router_logits(x_BSD, router.weight, router.bias) - self.context.config.routing.bias_scale * taken

    def _count(self, length: int) -> int:
        """Tokens that each layer takes of a sequence under top-k."""
        K = self.context.config.routing.K
        if length % K:
            raise ValueError(f"layers that take 1/{K} of the tokens can't share sequences of {length} tokens")
        return length // K

    @torch.no_grad()
    @record_function(SELECTION)
    def _select(self, score_BS: Tensor) -> Selection:
        if self.context.routing == "threshold":
            return select_threshold(score_BS)
        return select_top_k(score_BS, self._count(score_BS.shape[1]), self.context.kernels.select)

    @torch.no_grad()
    def _select_free(self, score_BS: Tensor, free_BS: Tensor, last: bool) -> Selection:
        if last and self.last_takes_rest:
            score_BS = torch.zeros_like(score_BS)
        return self._select(score_BS.masked_fill(~free_BS, float("-inf")))

    @torch.no_grad()
    @record_function(SELECTION)
    def _select_round(self, score_BSR: Tensor) -> tuple[Tensor, Selection]:
        """The layer of the round that takes each token under top-k, [B, S], and the tokens of each, [R, B, K]."""
        owner_BS, positions_RBK = self.context.kernels.select(score_BSR, self._count(score_BSR.shape[1]))
        return owner_BS, Selection(positions_RBK)

    def _update(self, x_BSD, score_BS, selection, weights: LayerWeights, scale, cache):
        """x with the gated update of the selected tokens (eq. 6, 7).

        Score, selection, weights and scale are those of one layer, or of all layers of a round with R in front.
        """
        if not selection.positions_BK.shape[-1]:
            return x_BSD
        start = 0 if cache is None else cache.start
        angles = self.context.rope(start + selection.positions_BK, start + x_BSD.shape[1], x_BSD.dtype)
        run = self.context.maybe_compiled(_sparse_update, cache)
        return run(x_BSD, score_BS, selection, weights, scale, angles, self.context, cache)

    def _attach(self, x_BSD: Tensor, loss: Callable[[], Tensor]) -> Tensor:
        """x with the gradient of the routing loss, the sum over layers (eq. 42, 43). Evaluation does not compute it."""
        coefficient = self.context.config.routing.loss_coefficient
        if not torch.is_grad_enabled() or coefficient == 0:
            return x_BSD
        return attach_loss(x_BSD, coefficient * loss(), self.context.auxiliary_scale)


def _sparse_update(x_BSD, score_BS, selection: Selection, w: LayerWeights, scale, angles, context: ModelContext, cache):
    kernels, shape, x_ND = context.kernels, selection.positions_BK.shape, x_BSD.flatten(0, 1)
    index = flat_positions(selection, x_BSD.shape[1])
    rows_MD, normed_MD = kernels.gather_norm(x_ND, index.flatten(), w.attention_norm, context.config.norm_eps)
    a_BKD = attention_update(normed_MD.view(*shape, -1), w, angles, context, cache)
    f_BKD = mlp_update(context.norm(rows_MD.view(*shape, -1) + a_BKD, w.mlp_norm), w, context)
    gate_BK = score_BS.gather(-1, selection.positions_BK).sigmoid()
    if scale is not None:
        gate_BK = gate_BK * scale.view(*scale.shape, *[1] * (gate_BK.dim() - scale.dim()))
    if context.config.routing.gate == "ffn":
        delta_BKD, gate_BK = a_BKD + (gate_BK.unsqueeze(-1) * f_BKD).to(a_BKD.dtype), None
    else:
        delta_BKD = a_BKD + f_BKD
    chosen = slice(None) if selection.valid_BK is None else selection.valid_BK
    index, delta_BKD, gate_BK = (None if part is None else part[chosen] for part in (index, delta_BKD, gate_BK))
    return kernels.scatter_add(x_ND, index.flatten(), delta_BKD.reshape(-1, x_ND.shape[1]),
                               None if gate_BK is None else gate_BK.flatten()).view_as(x_BSD)


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
