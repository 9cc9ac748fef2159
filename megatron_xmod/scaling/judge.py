"""How good a fit is: scores, whole groups held out, and the regret of choosing K by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.checks import budgets
from megatron_xmod.scaling.fit import Fit, Problem, fit, two_stage
from megatron_xmod.scaling.law import BASE, REDUCED, XMOD
from megatron_xmod.scaling.separable import Form, Params, Runs

# Fits the runs it is given and returns printed parameters of `XMOD`, or of `BASE` where no run has A != 1.
Fitter = Callable[[Problem], Params]
HELD_OUT_BY = ("L", "A", "N_act")


def scores(measured: np.ndarray, predicted: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """rmse and mae in nats, r2 on the residual against the dense reference (not a number for constant ones)."""
    error = predicted - measured
    spread = np.sum((measured - base - np.mean(measured - base)) ** 2)
    return {"runs": len(error), "rmse": float(np.sqrt(np.mean(error**2))), "mae": float(np.mean(np.abs(error))),
            "r2": float(1 - np.sum(error**2) / spread) if spread > 0 else float("nan")}


def fit_scores(best: Fit) -> dict[str, float]:
    """The scores of a fit on its own runs."""
    problem = best.problem
    return scores(problem.y, problem.predict(best.params), problem.base)


def joint(problem: Problem, fixed: dict[str, float] | None = None, seed: int = 0) -> Params:
    """A `Fitter`: all parameters together, but for the exponents held at a value."""
    form = problem.form if np.any(problem.x["A"] != 1) or problem.form is not XMOD else BASE
    return fit(replace(problem, form=form), starts=16, seed=seed, fixed=held(form, fixed or {})).params


def held(form: Form, fixed: dict[str, float]) -> dict[str, float]:
    """Those of the exponents held at a value that a law has."""
    return {e.name: fixed[e.name] for e in form.exponents if e.name in fixed}


def nested_start(problem: Problem, fixed: dict[str, float], seed: int, known: Fit | None = None) -> tuple[Params, ...]:
    """A start for a law that is wider than `XMOD`: `XMOD`'s own fit, so that the wider law never fits worse.

    Args:
        known: The fit of `XMOD`, if there is one.
    """
    if problem.form.name not in REDUCED:
        return ()
    if known is None:
        known = fit(replace(problem, form=XMOD), seed=seed, fixed=held(XMOD, fixed))
    return (known.params | REDUCED[problem.form.name],)


def staged(problem: Problem, seed: int = 0) -> Params:
    """A `Fitter`: the published two stages."""
    return two_stage(problem, seed).params


@dataclass(frozen=True)
class HeldOut:
    """One group left out: which runs [m], and what the rest predicts for them [m]; or why that can't be."""

    variable: str
    value: float
    runs: np.ndarray
    predicted: np.ndarray
    problem: str = ""


def leave_groups_out(problem: Problem, variable: str, fitter: Fitter = joint) -> list[HeldOut]:
    """Leaves out every run with one value of `variable` (L, A or N_act), one value after the other.

    Predicted are those of the runs left out that belong to the sweep over the variable: where the other two take
    the same values at several values of it. A = 1 is never left out, it is the anchor's zero.
    """
    results = []
    sweep = _sweep_over(problem.x, variable)
    for value in np.unique(problem.x[variable][sweep]):
        if variable == "A" and value == 1:
            continue
        out = problem.x[variable] == value
        runs = np.flatnonzero(out & sweep)
        try:
            _require_two_values(problem.x[variable][~out], variable)
            params = fitter(problem.select(~out))
            predicted, reason = _predict(problem.select(out & sweep), params), ""
        except UserError as error:
            predicted, reason = np.full(len(runs), np.nan), str(error)
        results.append(HeldOut(variable, float(value), runs, predicted, reason))
    return results


def _require_two_values(rest: np.ndarray, variable: str) -> None:
    if len(np.unique(rest)) < 2:
        raise UserError(f"the rest has fewer than 2 values of {variable}, which do not tell how the loss depends on it")


def _predict(problem: Problem, params: Params) -> np.ndarray:
    form = problem.form if set(problem.form.names) <= set(params) else BASE
    return problem.base + form.predict(params, problem.x)


def _sweep_over(x: Runs, variable: str) -> np.ndarray:
    """Which runs have the other two variables in common with runs at another value [n]."""
    others = [name for name in HELD_OUT_BY if name != variable]
    places = list(zip(*(x[name] for name in others), strict=True))
    values: dict[tuple, set] = {}
    for place, value in zip(places, x[variable], strict=True):
        values.setdefault(place, set()).add(value)
    return np.array([len(values[place]) > 1 for place in places])


def pooled_scores(problem: Problem, results: list[HeldOut], values: set[float] | None = None) -> dict[str, float]:
    """Scores over all groups that could be predicted, or those of them with one of the `values`."""
    good = [result for result in results if not result.problem and (values is None or result.value in values)]
    if not good:
        return {"runs": 0}
    runs = np.concatenate([result.runs for result in good])
    return scores(problem.y[runs], np.concatenate([result.predicted for result in good]), problem.base[runs])


def regrets(problem: Problem, predicted: np.ndarray) -> list[dict[str, float]]:
    """For each N_act, L, A and budget with several K: the K with the smallest prediction, and what it cost.

    Runs with the same K (several seeds) count by their means. `regret` is the measured loss at the chosen K minus the
    smallest measured loss of the tested ones, in nats.
    """
    x, known = problem.x, np.isfinite(predicted)
    places = np.stack([x["N_act"], x["L"], x["A"]], axis=1)
    rows = []
    for place in np.unique(places[known], axis=0):
        there = np.flatnonzero((places == place).all(axis=1) & known)
        budget = budgets(x["C"][there])
        for C in np.unique(budget):
            runs = there[budget == C]
            K, of = np.unique(x["K"][runs], return_inverse=True)
            if len(K) < 2:
                continue
            hoped, found = (np.bincount(of, values[runs]) / np.bincount(of) for values in (predicted, problem.y))
            chosen, best = np.argmin(hoped), np.argmin(found)
            rows.append(dict(zip(("N_act", "L", "A", "C"), (*place, C), strict=True))
                        | {"chosen_K": K[chosen], "best_K": K[best], "regret": found[chosen] - found[best]})
    return rows
