"""How sure the parameters are: cluster bootstrap, and profile likelihood for exponents that are hardly identified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.stats import f as f_distribution
from scipy.stats import norm
from scipy.stats import t as student

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.fit import Fit, refit
from megatron_xmod.scaling.separable import Params

# An exponent is identified when its interval stays within this factor of the estimate.
_WITHIN = 2.0


@dataclass(frozen=True)
class Bootstrap:
    """Refits to clusters drawn with replacement. `runs`, `clusters`: how many there were; `free`: fitted parameters."""

    draws: list[Params]
    runs: int
    clusters: int
    free: int

    def intervals(self, level: float) -> dict[str, tuple[float, float]]:
        """An interval for every parameter."""
        share = expanded_share(level, self.runs, self.clusters, self.free)
        ends = {name: percentile_interval([draw[name] for draw in self.draws], share) for name in self.draws[0]}
        return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def bootstrap(best: Fit, clusters: Sequence, count: int, seed: int | np.random.Generator = 0
              ) -> Bootstrap:
    """`count` refits, each from the parameters of `best`.

    Args:
        clusters: The cluster of each observation [n]: what shares its errors, such as the points of one run.

    Raises:
        UserError: there is one cluster, which says nothing about scatter.
    """
    names, member = np.unique(np.asarray(clusters), return_inverse=True)
    size = len(names)
    if count and size == 1:
        raise UserError(f"the bootstrap draws groups of rows, but all rows are of one ({names[0]}). Give them other "
                        "groups, or set --bootstrap 0.")
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(count):
        times = np.bincount(rng.integers(size, size=size), minlength=size)
        draws.append(refit(best, times[member].astype(float)).params)
    return Bootstrap(draws, len(member), size, len(best.problem.form.names) - len(best.fixed))


def expanded_share(level: float, runs: int, clusters: int, free: int) -> float:
    """The central share of the draws that makes an interval at `level`.

    Draws scatter about the estimate less than the estimate about the truth, as residuals are smaller than errors, and
    from few clusters the scatter is hardly known. So the normal quantile of `level` gives way to Student's with
    clusters - 1 degrees of freedom, times the small-sample factor of cluster-robust errors (Cameron and Miller, Journal
    of Human Resources 50, 2015); the share is what lies within that (Hesterberg's expanded percentiles, arXiv
    1411.5279).
    """
    factor = np.sqrt(clusters / (clusters - 1) * (runs - 1) / (runs - free))
    return float(2 * norm.cdf(factor * student.ppf((1 + level) / 2, clusters - 1)) - 1)


def percentile_interval(values: np.ndarray | Sequence[float], share: float) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the central `share` of the values, over their first axis.

    The q-quantile of B draws is the (B+1)q-th smallest, which a further draw undercuts with probability q.
    """
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2], axis=0, method="weibull")
    return low, high


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
