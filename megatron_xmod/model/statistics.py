"""What routing did in one anchor group: the figures of the paper's table 10, per layer and per group."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_xmod.model.exclusive import own_by_threshold, routing_losses
from megatron_xmod.model.router import Selection, routing_loss, select_top_k, selection_mask


class GroupStatistics:
    """Collects over the sparse layers between two dense anchors.

    Args:
        length: Tokens per sequence, S.
        K: Inverse token sparsity.
    """

    def __init__(self, length: int, K: int):
        self.length, self.K = length, K
        self.layers: list[Tensor] = []
        self.updates_BS: Tensor | None = None
        self.previous_BS: Tensor | None = None
        self.overlap_sum_B: Tensor | float = 0.0
        self.overlap_pairs_B: Tensor | float = 0.0

    @torch.no_grad()
    def record_soft(self, score_BS: Tensor, selection: Selection, scale: Tensor | None) -> None:
        """Takes in one layer that chose among all tokens: its biased logits, whom it took, its residual scale."""
        by_top_k = selection_mask(select_top_k(score_BS, self.length // self.K), self.length)
        self._record(selection_mask(selection, self.length), score_BS >= 0, by_top_k, score_BS, scale,
                     routing_loss(score_BS, selection))

    @torch.no_grad()
    def record_exclusive(self, score_BSR: Tensor, owner_BS: Tensor, by_top_k_BS: Tensor, scale_R: Tensor | None,
                         last_takes_rest: bool) -> None:
        """Takes in the layers of an exclusive round: which of them took each token, and which would under top-k."""
        by_threshold = own_by_threshold(score_BSR, last_takes_rest)
        losses = routing_losses(score_BSR, owner_BS, last_takes_rest)
        for layer in range(score_BSR.shape[-1]):
            self._record(owner_BS == layer, by_threshold == layer, by_top_k_BS == layer, score_BSR[..., layer],
                         None if scale_R is None else scale_R[layer], losses[layer])

    def _record(self, taken, by_threshold, by_top_k, score_BS, scale, loss) -> None:
        both = (by_threshold & by_top_k).sum()
        gate = (score_BS.sigmoid() * taken).sum() / taken.sum().clamp(min=1)
        updates = self.updates_BS if self.updates_BS is not None else torch.zeros_like(score_BS)
        one = torch.ones((), device=score_BS.device)
        # The order of LAYER_FIGURES.
        self.layers.append(torch.stack([value.float() for value in (
            taken.float().mean(), by_threshold.float().mean(), gate, one if scale is None else scale, updates.mean(),
            loss, (by_threshold == by_top_k).float().mean(), both / by_threshold.sum().clamp(min=1),
            both / by_top_k.sum().clamp(min=1), 2 * both / (by_threshold.sum() + by_top_k.sum()).clamp(min=1))]))
        if self.previous_BS is not None:
            union = (taken | self.previous_BS).sum(-1)
            shared = (taken & self.previous_BS).sum(-1)
            self.overlap_sum_B = self.overlap_sum_B + shared / union.clamp(min=1)
            self.overlap_pairs_B = self.overlap_pairs_B + (union > 0)
        self.previous_BS = taken
        self.updates_BS = updates + taken

    def finish(self) -> dict[str, Tensor]:
        """Per layer [layers] for each of LAYER_FIGURES; `coverage` and `overlap` of the group."""
        columns = torch.stack(self.layers, dim=1)
        figures = dict(zip(LAYER_FIGURES, columns, strict=True))
        figures["coverage"] = (self.updates_BS > 0).float().mean()
        if len(self.layers) > 1:
            # Each sequence's mean over its pairs with anybody in them, then the mean over sequences.
            overlap_B = self.overlap_sum_B / self.overlap_pairs_B.clamp(min=1)
            figures["overlap"] = overlap_B.sum().float() / (self.overlap_pairs_B > 0).sum().clamp(min=1)
        return figures


LAYER_FIGURES = (
    "selected",         # share of tokens that entered
    "above_threshold",  # share of tokens that the causal rule lets in, on the same scores
    "gate",             # mean gate of the tokens that entered
    "scale",            # residual scale
    "bias",             # mean earlier selections of a token, b
    "routing_loss",     # binary cross-entropy
    "agreement",        # share of tokens on which threshold and top-k agree, on the same scores
    "precision",        # of the threshold's choice against the top-k's
    "recall",
    "f1",
)
