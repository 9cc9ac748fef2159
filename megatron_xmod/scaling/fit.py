"""Fitting a law: variable projection from many starts, then all parameters together under the asked loss; and the
paper's two stages, kept as they are described, to compare with (X-MoD, arXiv 2609.34212, appendix B.5)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import differential_evolution
from scipy.stats import qmc

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.law import ANCHOR, BASE
from megatron_xmod.scaling.separable import Form, Params, Runs
from megatron_xmod.scaling.solve import levenberg, linear, objective

# Half-width of Huber's parabola, in the units of the residual (nats, or relative where the residual is a log).
HUBER_DELTA = 1e-3
# Absolute deviations as the end of a sequence of Huber losses, each started from the last.
_DELTAS = {"mse": (np.inf,), "huber": (HUBER_DELTA,), "l1": (1e-3, 1e-4, 1e-5, 1e-7, 5e-9)}


@dataclass(frozen=True)
class Problem:
    """What is fitted to what.

    Attributes:
        form: The law.
        x: Its variables, [n] each.
        y: Measured values [n].
        base: What the law is added to [n]: the dense loss, or 0.
        log: Residuals are ln(predicted) - ln(measured) instead of predicted - measured.
        loss: mse, huber (delta 1e-3) or l1.
        weights: [n]; a bootstrap sample is the number of times each run was drawn.
    """

    form: Form
    x: Runs
    y: np.ndarray
    base: np.ndarray
    log: bool = False
    loss: str = "mse"
    weights: np.ndarray | None = None

    def __post_init__(self):
        if self.weights is None:
            object.__setattr__(self, "weights", np.ones(len(self.y)))

    def select(self, mask: np.ndarray) -> Problem:
        """The problem on some of the runs."""
        x = {name: values[mask] for name, values in self.x.items()}
        return replace(self, x=x, y=self.y[mask], base=self.base[mask], weights=self.weights[mask])

    def predict(self, params: Params) -> np.ndarray:
        """Predicted values [n], the base included."""
        return self.base + self.form.predict(params, self.x)


@dataclass(frozen=True)
class Fit:
    """A fitted law. `objective`: the minimised sum, with the loss of the problem."""

    problem: Problem
    params: Params
    objective: float
    fixed: dict[str, float] = field(default_factory=dict)

    @property
    def residuals(self) -> np.ndarray:
        """Measured minus predicted [n]."""
        return self.problem.y - self.problem.predict(self.params)


def fit(problem: Problem, starts: int = 40, seed: int = 0, extra: tuple[Params, ...] = (),
        fixed: dict[str, float] | None = None) -> Fit:
    """The best of many local fits.

    Args:
        starts: Random starts of the exponents (a Sobol sequence over their ranges).
        extra: Further starts, as printed parameters; the fit is never worse than any of them.
        fixed: Exponents held at a value.

    Raises:
        UserError: there are not more runs than parameters.
    """
    require_runs(problem, fixed or {})
    solver = _Solver(problem, fixed or {})
    thetas = [solver.project(theta) for theta in solver.random_starts(starts, seed)]
    thetas += [solver.project(problem.form.from_public(params)[0]) for params in extra]
    points = {tuple(np.round(solver.full(theta), 10)): solver.full(theta) for theta in thetas}
    points = sorted(points.values(), key=solver.value)[:4]
    extras = [solver.clip(np.concatenate(problem.form.from_public(params))) for params in extra]
    # Polishing towards l1 goes by way of other losses, so it may end above its start.
    return solver.best([*(solver.polish(point) for point in points + extras), *extras])


def require_runs(problem: Problem, fixed: dict[str, float]) -> None:
    """Refuses a fit with fewer runs than parameters and one to spare."""
    form = problem.form
    free = len(form.names) - len(fixed)
    if len(problem.y) <= free:
        raise UserError(f"the law {form.name} with {free} parameter{'s' * (free != 1)} to fit needs at least "
                        f"{free + 1} runs, but {len(problem.y)} can be used. Add runs, or hold some exponents at a "
                        "value.")


def refit(start: Fit, weights: np.ndarray | None = None, fixed: dict[str, float] | None = None) -> Fit:
    """A fit to the same runs from the parameters of `start` alone, with other weights or exponents held."""
    problem = start.problem if weights is None else replace(start.problem, weights=weights)
    solver = _Solver(problem, start.fixed if fixed is None else fixed)
    theta, c = problem.form.from_public(start.params)
    return solver.best([solver.polish(np.concatenate([theta, c]))])


class _Solver:
    """Variable projection and the joint fit of one problem. theta [p]: exponents; point [p+q]: with coefficients."""

    def __init__(self, problem: Problem, fixed: dict[str, float]):
        form = problem.form
        self.problem, self.fixed = problem, fixed
        self.p = len(form.exponents)
        self.low, self.high = form.low.astype(float), form.high.astype(float)
        for i, exponent in enumerate(form.exponents):
            if exponent.name in fixed:
                self.low[i] = self.high[i] = fixed[exponent.name]
        self.weights = problem.weights
        # In log space a linear fit weighted by 1/y is the nearest linear problem.
        self.root = np.sqrt(self.weights) / (problem.y if problem.log else 1.0)

    def random_starts(self, count: int, seed: int) -> list[np.ndarray]:
        if count == 0:
            return []
        if self.p == 0:
            return [np.zeros(0)]
        points = qmc.Sobol(self.p, seed=seed).random(1 << (count - 1).bit_length())[:count]
        # Squared: small exponents are the likely ones.
        near = np.where(self.low > 0, points**2, points)
        return list(self.low + near * (self.high - self.low))

    def project(self, theta: np.ndarray) -> np.ndarray:
        """A local minimum of least squares over the exponents, the coefficients solved at each step (Kaufman)."""
        return levenberg(self._projected, np.clip(theta, self.low, self.high), self.low, self.high,
                         np.ones(len(self.problem.y)), max_steps=60) if self.p else theta

    def _projected(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        columns, slopes = self.problem.form.basis(theta, self.problem.x)
        columns = columns * self.root[:, None]
        target = (self.problem.y - self.problem.base) * self.root
        c = linear(columns, target, self.problem.form.free)
        change = (slopes @ c).T * self.root[:, None]
        active = self.problem.form.free | (c > 0)
        q, _ = np.linalg.qr(columns[:, active])
        return columns @ c - target, change - q @ (q.T @ change)

    def full(self, theta: np.ndarray) -> np.ndarray:
        columns = self.problem.form.basis(theta, self.problem.x)[0] * self.root[:, None]
        target = (self.problem.y - self.problem.base) * self.root
        return np.concatenate([theta, linear(columns, target, self.problem.form.free)])

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The ends of all parameters [p+q]."""
        free = self.problem.form.free
        return (np.concatenate([self.low, np.where(free, -np.inf, 0.0)]),
                np.concatenate([self.high, np.full(len(free), np.inf)]))

    def clip(self, point: np.ndarray) -> np.ndarray:
        return np.clip(point, *self.bounds())

    def polish(self, point: np.ndarray) -> np.ndarray:
        """A local minimum over all parameters under the loss asked for."""
        low, high = self.bounds()
        point = self.clip(point)
        for delta in _DELTAS[self.problem.loss]:
            point = levenberg(self._joint, point, low, high, self.weights, delta)
        return point

    def _joint(self, point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        problem, c = self.problem, point[self.p:]
        columns, slopes = problem.form.basis(point[:self.p], problem.x)
        predicted = problem.base + columns @ c
        jacobian = np.concatenate([(slopes @ c).T, columns], axis=1)
        if not problem.log:
            return predicted - problem.y, jacobian
        if np.any(predicted <= 0):
            return np.full(len(predicted), np.nan), jacobian
        return np.log(predicted / problem.y), jacobian / predicted[:, None]

    def value(self, point: np.ndarray) -> float:
        value = objective(self._joint(point)[0], self.weights, _DELTAS[self.problem.loss][-1])
        return value if np.isfinite(value) else np.inf

    def best(self, points: list[np.ndarray]) -> Fit:
        point = min(points, key=self.value)
        params = self.problem.form.to_public(point[:self.p], point[self.p:])
        return Fit(self.problem, params, self.value(point), self.fixed)


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
    first = replace(problem.select(problem.x["A"] == 1), form=BASE)
    params = _evolve(first, seed)
    if np.all(problem.x["A"] == 1):
        return TwoStage(params, 0.0)
    sweep = problem.select(_in_sweep(problem))
    second = replace(sweep, form=ANCHOR, base=sweep.base + BASE.predict(params, sweep.x))
    anchor = _evolve(second, seed)
    offset = anchor.pop("e")
    return TwoStage(params | anchor, offset)


def _in_sweep(problem: Problem) -> np.ndarray:
    """Which runs belong to the A-sweep [n]."""
    x = problem.x
    places = {(n, length) for n, length, a in zip(x["N_act"], x["L"], x["A"], strict=True) if a != 1}
    return np.array([(n, length) in places for n, length in zip(x["N_act"], x["L"], strict=True)])


def _evolve(problem: Problem, seed: int) -> Params:
    require_runs(problem, {})
    form, target = problem.form, problem.y - problem.base

    def error(theta: np.ndarray) -> float:
        columns = form.basis(theta, problem.x)[0]
        return float(np.mean((columns @ linear(columns, target, form.free) - target) ** 2))

    found = differential_evolution(error, list(zip(form.low, form.high, strict=True)), rng=seed, tol=1e-8,
                                   maxiter=2000)
    return form.to_public(found.x, linear(form.basis(found.x, problem.x)[0], target, form.free))
