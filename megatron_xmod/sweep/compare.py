"""Losses of runs against dense ones, at equal tokens and at equal training FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from megatron_xmod.flops import active_params
from megatron_xmod.scaling.data import interpolate
from megatron_xmod.sweep.identity import is_dense
from megatron_xmod.sweep.plan import Run
from megatron_xmod.sweep.state import DONE, State

AXES = ("tokens", "flops")
_WELL_BEYOND = 1.02  # budgets are rounded to whole steps
_BARELY_BEYOND = 1.005  # at equal steps, the routers' FLOPs may make a sparse run the longer one
LOSSES = ("loss_causal", "loss_topk")
Pairs = Sequence[tuple[Run, State]]


@dataclass(frozen=True)
class Curve:
    """Validations of a finished run after its first step.

    Attributes:
        points: step, tokens, flops, loss_causal, loss_topk: [n] each.
    """

    run: Run
    points: dict[str, np.ndarray]
    seconds: float | None

    def end(self, name: str) -> float:
        return float(self.points[name][-1])

    def at(self, axis: str, value: float, loss: str) -> float:
        """The loss at a value that the curve covers: monotone cubic interpolation of ln loss over the axis's ln."""
        return interpolate(self.points[axis], self.points[loss], min(value, self.end(axis)))

    def covers(self, axis: str, value: float) -> bool:
        """Whether a value lies inside the curve, or so little beyond its end that the loss there is the same."""
        return self.points[axis][0] * (1 - 1e-9) <= value <= self.end(axis) * _BARELY_BEYOND


@dataclass(frozen=True)
class Difference:
    """Loss minus that of dense, nats per token.

    Attributes:
        at: Where on the axis: the shorter end of both.
        error: Standard error over the seeds of both; None where one of them has a single seed.
        dense_inside, own_inside: Whether the dense (the own) curve goes on beyond that point, so that its loss there
            is one of the middle of a learning-rate schedule.
    """

    mean: float
    at: float
    error: float | None
    dense_inside: bool
    own_inside: bool


def curve_of(run: Run, state: State) -> Curve | None:
    """None for a run that is not done."""
    found = [entry for entry in state.validation if entry["step"] > 0]
    if state.status != DONE or not found:
        return None
    steps = np.array([entry["step"] for entry in found], dtype=float)
    points = {"step": steps, "tokens": steps * run.tokens_per_step, "flops": steps * run.flops_per_step}
    return Curve(run, points | {name: np.array([entry[name] for entry in found]) for name in LOSSES}, state.seconds)


def group_key(run: Run) -> tuple:
    """What runs that are compared share: N_act, L, and the budget or else the steps."""
    config = run.config
    return active_params(config.model), config.data.seq_length, run.budget or config.train.steps


def groups(pairs: Pairs) -> dict[tuple, dict[str, list[Curve]]]:
    """The curves of finished runs: by what is compared, then by variant, one per seed."""
    found: dict[tuple, dict[str, list[Curve]]] = defaultdict(lambda: defaultdict(list))
    for run, state in pairs:
        curve = curve_of(run, state)
        if curve:
            found[group_key(run)][run.variant].append(curve)
    return {key: dict(variants) for key, variants in found.items()}


def dense_curves(variants: dict[str, list[Curve]]) -> list[Curve]:
    """The dense runs of a group; of several dense variants the one with the lowest causal loss."""
    dense = [curves for curves in variants.values() if is_dense(curves[0].run.config)]
    return min(dense, key=lambda curves: mean(c.end("loss_causal") for c in curves), default=[])


def difference(own: list[Curve], dense: list[Curve], axis: str, loss: str) -> Difference | None:
    """Mean over seeds of `own` minus that of `dense`. None where one curve begins after the other's end."""
    ends = [min(curve.end(axis) for curve in curves) for curves in (own, dense)]
    at = min(ends)
    if not all(curve.covers(axis, at) for curve in (*own, *dense)):
        return None
    mine, theirs = ([curve.at(axis, at, loss) for curve in curves] for curves in (own, dense))
    error = None
    if len(mine) > 1 and len(theirs) > 1:
        error = (stdev(mine) ** 2 / len(mine) + stdev(theirs) ** 2 / len(theirs)) ** 0.5
    return Difference(mean(mine) - mean(theirs), at, error, *(end > _WELL_BEYOND * at for end in reversed(ends)))


def dense_reference(curves: list[Curve], C: float) -> dict[str, Any]:
    """dense_loss (causal) and dense_tokens at C, where the dense runs reach it; else nothing."""
    if not curves or not all(curve.covers("flops", C) for curve in curves):
        return {}
    return {"dense_loss": mean(curve.at("flops", C, "loss_causal") for curve in curves),
            "dense_tokens": C / curves[0].run.flops_per_step * curves[0].run.tokens_per_step}
