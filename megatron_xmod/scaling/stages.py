"""The paper's two-stage fit (X-MoD, arXiv 2609.34212, appendix B.5), kept as it is described, to compare with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import differential_evolution

from megatron_xmod.scaling.fit import Problem, require_runs
from megatron_xmod.scaling.law import ANCHOR, BASE
from megatron_xmod.scaling.separable import Form, Params
from megatron_xmod.scaling.solve import linear


class TwoStage(NamedTuple):
    """Parameters of the law, and the free offset of the second stage, which the printed law has no place for.

    Without runs at A != 1 there is no second stage: the parameters are those of `BASE`, the offset is 0.
    """

    params: Params
    sweep_offset: float


def two_stage(problem: Problem, seed: int = 0) -> TwoStage:
    """Stage 1: the base law on the runs with A = 1. Stage 2: z, rho_K and rho_A on the A-sweep, the base frozen.

    In each stage differential evolution searches the exponents for the smallest mean squared error; for each candidate
    the coefficients are solved by constrained least squares, the offset free and the others at least 0. The A-sweep is
    every run with A != 1, and those with A = 1 of the same N_act and L.

    Args:
        problem: The law `XMOD` on raw losses.

    Raises:
        UserError: a stage has too few runs.
    """
    first = _replace(problem.select(problem.x["A"] == 1), BASE, None)
    params = _evolve(first, seed)
    if np.all(problem.x["A"] == 1):
        return TwoStage(params, 0.0)
    sweep = problem.select(in_sweep(problem))
    second = _replace(sweep, ANCHOR, sweep.base + BASE.predict(params, sweep.x))
    anchor = _evolve(second, seed)
    offset = anchor.pop("e")
    return TwoStage(params | anchor, offset)


def in_sweep(problem: Problem) -> np.ndarray:
    """Which runs belong to the A-sweep [n]."""
    x = problem.x
    places = {(n, length) for n, length, a in zip(x["N_act"], x["L"], x["A"], strict=True) if a != 1}
    return np.array([(n, length) in places for n, length in zip(x["N_act"], x["L"], strict=True)])


def _replace(problem: Problem, form: Form, base: np.ndarray | None) -> Problem:
    return Problem(form, problem.x, problem.y, problem.base if base is None else base, weights=problem.weights)


def _evolve(problem: Problem, seed: int) -> Params:
    require_runs(problem, {})
    form, target = problem.form, problem.y - problem.base

    def error(theta: np.ndarray) -> float:
        columns = form.basis(theta, problem.x)[0]
        return float(np.mean((columns @ linear(columns, target, form.free) - target) ** 2))

    found = differential_evolution(error, list(zip(form.low, form.high, strict=True)), rng=seed, tol=1e-8,
                                   maxiter=2000)
    return form.to_public(found.x, linear(form.basis(found.x, problem.x)[0], target, form.free))
