"""How sure the parameters are: cluster bootstrap, and profile likelihood for exponents that are hardly identified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.stats import f as f_distribution

from megatron_xmod.scaling.fit import Fit, refit
from megatron_xmod.scaling.separable import Params

# An exponent is identified when its interval stays within this factor of the estimate.
_WITHIN = 2.0


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


class Interval(NamedTuple):
    """Confidence interval of a parameter. `identified`: both ends lie within the searched range and within a factor
    of 2 of a positive estimate."""

    low: float
    high: float
    identified: bool


def profile_interval(best: Fit, name: str, level: float) -> Interval:
    """The values of exponent `name` that least squares does not reject at `level`, all other parameters refitted.

    Args:
        best: A fit with the loss mse.
        level: 0.8 for an 80 % interval.
    """
    assert best.problem.loss == "mse"
    exponent = next(e for e in best.problem.form.exponents if e.name == name)
    low, low_open = _end(best, name, level, exponent.low, -1)
    high, high_open = _end(best, name, level, exponent.high, 1)
    narrow = _WITHIN * low >= best.params[name] > 0 and high <= _WITHIN * best.params[name]
    return Interval(low, high, narrow and not low_open and not high_open)


def profile_curve(best: Fit, ends: dict[str, Interval], level: float
                  ) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], float]:
    """For pictures: the relative rise of the squared error over each exponent a little beyond its interval, as
    (values [m], rise [m]), and the rise that `level` rejects."""
    curves = {}
    for name, interval in ends.items():
        exponent = next(e for e in best.problem.form.exponents if e.name == name)
        margin = 0.3 * (interval.high - interval.low)
        values = np.linspace(max(exponent.low, interval.low - margin), min(exponent.high, interval.high + margin), 25)
        rises = [refit(best, fixed=best.fixed | {name: float(value)}).objective / best.objective - 1
                 for value in values]
        curves[name] = (values, np.array(rises))
    return curves, _limit(best, level)


def _limit(best: Fit, level: float) -> float:
    """The relative rise of the squared error that rejects a value: an F test with one degree of freedom."""
    spare = max(1, len(best.problem.y) - len(best.problem.form.names) + len(best.fixed))
    return float(f_distribution.ppf(level, 1, spare) / spare)


def _end(best: Fit, name: str, level: float, bound: float, side: int) -> tuple[float, bool]:
    """Where the profile crosses the threshold on one side; the bound, and True, where it does not."""
    limit = best.objective * (1 + _limit(best, level))
    near = {"fit": best}

    def excess(value: float) -> float:
        start = Fit(best.problem, near["fit"].params | {name: value}, best.objective, best.fixed)
        found = refit(start, fixed=best.fixed | {name: value})
        if found.objective < limit:
            near["fit"] = found
        return found.objective / limit - 1

    inside = best.params[name]
    step = 0.05 * max(abs(inside), 0.1)
    while True:
        outside = inside + side * step
        if side * (outside - bound) >= 0:
            if inside == bound or excess(bound) <= 0:
                return bound, True
            outside = bound
        if outside == bound or excess(outside) > 0:
            try:
                return float(brentq(excess, inside, outside, xtol=1e-4, rtol=1e-3)), False
            except ValueError:
                # From another start a refit may find another minimum, and the sign at an end of the bracket turns.
                return float(outside), False
        inside, step = outside, 2 * step
