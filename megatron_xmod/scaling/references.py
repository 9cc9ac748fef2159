"""Dense losses and tokens at matched training FLOPs, read from dense validation curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.interpolate import PchipInterpolator

from megatron_xmod.errors import UserError

# The dense twin's N_act may be counted a little differently; backbones differ by far more.
_SAME_SIZE = 0.01


class DenseCurves:
    """Validation curves of dense runs.

    Args:
        N_act, L, C, loss: Size, context, training FLOPs and validation loss of each point [m].
        run: Which run each point belongs to [m]; runs with the same size and context are averaged.
        tokens: Seen at each point [m], nan where that is not known.
    """

    def __init__(self, N_act: np.ndarray, L: np.ndarray, C: np.ndarray, loss: np.ndarray, run: Sequence[str],
                 tokens: np.ndarray | None = None):
        points = defaultdict(list)
        tokens = np.full(len(C), np.nan) if tokens is None else tokens
        for key in zip(N_act, L, run, C, loss, tokens, strict=True):
            points[key[:3]].append(key[3:])
        self._curves = {key: np.array(sorted(value)).T for key, value in points.items()}

    def at(self, N_act: float, L: float, C: float) -> float:
        """The dense loss at C: monotone cubic interpolation of ln loss over ln C, averaged over runs.

        Raises:
            UserError: no curve of that size and context, or none that reaches C; a curve is never prolonged.
        """
        fitting = self._fitting(N_act, L)
        if not fitting:
            raise UserError(f"there is no dense run (K = 1) with N_act = {N_act:.4g} and L = {L:g} to compare with")
        values = [interpolate(flops, loss, C) for flops, loss, _ in fitting if flops[0] <= C <= flops[-1]]
        if not values:
            low, high = min(c[0][0] for c in fitting), max(c[0][-1] for c in fitting)
            raise UserError(f"its C = {C:.4g} lies outside the dense curve with N_act = {N_act:.4g} and L = {L:g}, "
                            f"which goes from {low:.4g} to {high:.4g} FLOPs")
        return float(np.mean(values))

    def tokens_at(self, N_act: float, L: float, C: float) -> float | None:
        """Tokens that the dense model has seen at C, in proportion to its FLOPs; None where no run tells."""
        rates = [tokens / flops for flops, _, tokens in self._fitting(N_act, L)]
        known = [float(np.nanmean(rate)) for rate in rates if not np.isnan(rate).all()]
        return C * float(np.mean(known)) if known else None

    def _fitting(self, N_act: float, L: float) -> list[np.ndarray]:
        return [curve for (size, length, _), curve in self._curves.items()
                if length == L and abs(size / N_act - 1) < _SAME_SIZE]


def interpolate(flops: np.ndarray, loss: np.ndarray, C: float) -> float:
    """Loss at C inside a curve [n]: monotone cubic interpolation of ln loss over ln C."""
    flops, first = np.unique(flops, return_index=True)
    if len(flops) == 1:
        return float(loss[first[0]])
    return float(np.exp(PchipInterpolator(np.log(flops), np.log(loss[first]))(np.log(C))))
