"""Cluster bootstrap: whole runs (or groups of runs) are drawn with replacement, and the law is fitted to each draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_xmod.scaling.fit import Fit, refit
from megatron_xmod.scaling.separable import Params


def bootstrap(best: Fit, clusters: Sequence, count: int, seed: int = 0) -> list[Params]:
    """Parameters of `count` refits, each from the parameters of `best`.

    Args:
        clusters: The cluster of each observation [n]: what shares its errors, such as the points of one run.
    """
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    size = member.max() + 1
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(count):
        times = np.bincount(rng.integers(size, size=size), minlength=size)
        draws.append(refit(best, times[member].astype(float)).params)
    return draws


def percentile_interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """The central share `level` of the values."""
    low, high = np.percentile(np.asarray(values), [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def intervals(draws: list[Params], level: float) -> dict[str, tuple[float, float]]:
    """A percentile interval for every parameter."""
    return {name: percentile_interval([draw[name] for draw in draws], level) for name in draws[0]}
