"""Profile likelihood: how far an exponent can move before the rest of the law can no longer make up for it."""

from __future__ import annotations

from typing import NamedTuple

from scipy.optimize import brentq
from scipy.stats import f as f_distribution

from megatron_xmod.scaling.fit import Fit, refit

# A confidence interval whose ends differ by more than this factor says nothing of use about an exponent.
_WIDEST = 10.0


class Interval(NamedTuple):
    """Confidence interval of a parameter. `identified`: it ends within the searched range and is not very wide."""

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
    narrow = low > 0 and high / low <= _WIDEST or low <= 0 and high - low <= 1.0
    return Interval(low, high, narrow and not low_open and not high_open)


def _end(best: Fit, name: str, level: float, bound: float, side: int) -> tuple[float, bool]:
    """Where the profile crosses the threshold on one side; the bound, and True, where it does not."""
    form = best.problem.form
    spare = max(1, len(best.problem.y) - len(form.names) + len(best.fixed))
    limit = best.objective * (1 + f_distribution.ppf(level, 1, spare) / spare)
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
            return float(brentq(excess, inside, outside, xtol=1e-4, rtol=1e-3)), False
        inside, step = outside, 2 * step
