"""Which K and A for a budget: everything that can be built, judged by a fitted law."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import numpy as np
from scipy.optimize import minimize_scalar

from megatron_xmod import flops
from megatron_xmod.config.schema import Config, DataConfig, ModelConfig
from megatron_xmod.scaling.buildable import EDGE, Question, buildable, built_ratio, continuous_ratio, law_stride
from megatron_xmod.scaling.fitted import FittedLaw
from megatron_xmod.scaling.separable import Runs


@dataclass(frozen=True)
class Candidate:
    """A configuration that can be built. `A`: as configured; `law_A`: as the law is asked, which is what is built where
    that differs; `delta`: predicted loss against dense, nats; `p_best`: share of the law's bootstrap refits in which it
    is the best; `K_tested`, `A_tested`: K or A lies in the range of the law's data."""

    K: int
    A: float
    law_A: float
    ratio: float
    delta: float
    interval: tuple[float, float]
    p_best: float
    K_tested: bool
    A_tested: bool
    layers: int
    total_params: int
    flops_ratio: float

    @property
    def untested(self) -> tuple[int, bool]:
        """Sorts by how many of K and A are outside the law's data, A before K."""
        return (not self.K_tested) + (not self.A_tested), not self.K_tested


@dataclass(frozen=True)
class Choice:
    """The answer.

    Attributes:
        best: None where nothing within the tested range promises less loss than dense. Where the range of A can't be
            kept to, that of K still is, and the other way round.
        near_ties: Candidates that the law's own scatter can't tell from the best.
        candidates: All that can be built within the limits, by predicted loss, those outside the tested range last.
        continuous: K and delta of the optimum over real K at the best (or given) A, limits ignored; None where the law
            keeps falling with K.
        stride: The A of that optimum.
        notes: What to know before trusting the answer.
    """

    best: Candidate | None
    near_ties: list[Candidate]
    candidates: list[Candidate]
    continuous: tuple[float, float] | None
    stride: float
    p_dense: float
    notes: list[str]
    inside: bool


def choose(question: Question, law: FittedLaw) -> Choice:
    """The best K and A by the law.

    Raises:
        UserError: nothing can be built within the limits.
    """
    models = buildable(question, law.domain)
    candidates, p_dense = _judge(question, law, models)
    usable = [c for c in candidates if c.untested == candidates[0].untested]
    best = usable[0] if usable[0].delta < 0 else None
    level = best.delta if best else 0.0
    ties = [c for c in usable if c is not best and c.delta - level <= law.rmse]
    stride = usable[0].law_A
    optimum = continuous_optimum(question, law, stride)
    notes, inside = _doubts(question, law, best, usable[0])
    if optimum is None:
        notes.append(f"At A = {stride:g} the law keeps falling with K, so there is no optimal K: the end of the tested "
                     "range decides.")
    return Choice(best, ties, candidates, optimum, stride, p_dense, notes, inside)


def _judge(question: Question, law: FittedLaw, models: list[ModelConfig]) -> tuple[list[Candidate], float]:
    """The candidates by predicted loss, and the share of refits in which dense is best."""
    K = np.array([m.routing.K for m in models], dtype=float)
    A = np.array([law_stride(m) for m in models])
    ratio = np.array([built_ratio(question, m) for m in models])
    x = _variables(question, K, A, ratio)
    delta, draws = law.predict(x), law.predict_draws(x)
    ends = np.stack(law.interval(draws), axis=1).tolist()
    K_tested, A_tested = _within(law.domain["K"], K), _within(law.domain["A"], A)
    found = [Candidate(m.routing.K, m.routing.A, float(A[i]), float(ratio[i]), float(delta[i]),
                       tuple(ends[i]), 0.0, bool(K_tested[i]), bool(A_tested[i]),
                       flops.model_plan(m).layers, flops.total_params(m),
                       flops.flops_ratio_to_dense(m, question.seq_length)) for i, m in enumerate(models)]
    least = min(c.untested for c in found)
    allowed = np.array([c.untested == least for c in found])
    # Column 0 is dense.
    chances = np.concatenate([np.zeros((len(draws), 1)), np.where(allowed, draws, np.inf)], axis=1)
    share = np.bincount(np.argmin(chances, axis=1), minlength=len(K) + 1) / len(draws)
    found = [replace(c, p_best=float(p)) for c, p in zip(found, share[1:], strict=True)]
    return sorted(found, key=lambda c: (c.untested, c.delta)), float(share[0])


def _within(ends: tuple[float, float], value: np.ndarray | float) -> np.ndarray | bool:
    low, high = ends
    return (value >= low * (1 - EDGE)) & (value <= high * (1 + EDGE))


def _variables(question: Question, K: np.ndarray, A: np.ndarray, ratio: np.ndarray) -> Runs:
    one = np.ones_like(K, dtype=float)
    return {"N_act": one * question.active_params, "L": one * question.seq_length, "C": one * question.compute,
            "K": K, "A": one * A, "ratio": ratio}


def curve(question: Question, law: FittedLaw, K: np.ndarray, A: float) -> tuple[np.ndarray, ...]:
    """Delta over real K at one A, and the ends of its interval [n] each."""
    x = _variables(question, K, np.full(len(K), A), continuous_ratio(question, K, A))
    return law.predict(x), *law.interval(law.predict_draws(x))


def continuous_optimum(question: Question, law: FittedLaw, A: float) -> tuple[float, float] | None:
    """The real K from 1 to L with the smallest delta at one A, and that delta; None where that is K = L."""

    def delta(log_K: float) -> float:
        K = np.array([np.exp(log_K)])
        return float(law.predict(_variables(question, K, A, continuous_ratio(question, K, A)))[0])

    grid = np.linspace(0.0, log(question.seq_length), 400)
    lowest = int(np.argmin([delta(point) for point in grid]))
    if lowest == len(grid) - 1:
        return None
    ends = grid[max(0, lowest - 1)], grid[lowest + 1]
    found = minimize_scalar(delta, bounds=ends, method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x)), float(found.fun)


def outside_data(question: Question, law: FittedLaw, candidate: Candidate) -> list[str]:
    """Where a candidate leaves the law's data, a note for each variable."""
    asked = {"N_act": question.active_params, "L": question.seq_length, "K": candidate.K, "A": candidate.law_A}
    if "C" in law.form.variables:
        asked["C"] = question.compute
    notes = []
    for name, value in asked.items():
        low, high = law.domain[name]
        if not _within(law.domain[name], value):
            notes.append(f"OUTSIDE THE DATA: {name} = {value:g}, but the law was fitted on {low:g} to {high:g}.")
    for name, (low, high) in law.stride_domain.items() if candidate.law_A != 1 else ():
        if not _within((low, high), asked[name]):
            tested = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            notes.append(f"OUTSIDE THE DATA: A = {candidate.law_A:g} at {name} = {asked[name]:g}, but other A than 1 "
                         f"were only run at {name} = {tested}. --anchor-stride 1 stays inside.")
    return notes


def _doubts(question: Question, law: FittedLaw, best: Candidate | None, first: Candidate) -> tuple[list[str], bool]:
    """Notes for people, and whether the question lies inside the law's data."""
    notes = outside_data(question, law, first)
    inside = not notes
    if first.law_A != first.A:
        notes.append(f"A = {first.A:g} does not fit the active depth: what is built has A = {first.law_A:.4g} (sparse "
                     "equivalents over anchors), and the law was asked about that.")
    if "C" not in law.form.variables:
        notes.append("The law has no C in it: K and A do not depend on --compute, which only sets the tokens. Whether "
                     "the gain holds at another budget than that of its runs is not known.")
    notes.append(f"The interval and P(best) come from {len(law.draws)} {law.draws_from}.")
    if best is None:
        notes.append("No tested configuration promises less loss than the dense model: train dense.")
    elif law.params.get("z", 0.0) > 0 and question.anchor_stride is None and best.A >= law.domain["A"][1]:
        notes.append("The law improves with A without end (for K > 1), so the best A is the largest tested one; "
                     "--max-params and --max-layers bound it.")
    return notes, inside


def training_config(question: Question, candidate: Candidate) -> Config:
    """The configuration of a candidate, with default training settings."""
    routing = replace(question.model.routing, K=candidate.K, A=candidate.A)
    return Config(model=replace(question.model, routing=routing), data=DataConfig(seq_length=question.seq_length))
