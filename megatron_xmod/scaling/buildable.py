"""What can be built: the question, the backbone, and every K and A within the limits. No law has a say here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import ceil, floor, inf, log
from pathlib import Path

import numpy as np

from megatron_xmod import flops
from megatron_xmod.config.load import load_config
from megatron_xmod.config.schema import ModelConfig
from megatron_xmod.errors import UserError

_SIZES = Path(__file__).parents[2] / "examples" / "configs" / "size"
# A built A this near to the one asked for passes for it: the paper's A = 4 on 28 layers is 3.8 built.
_SAME_STRIDE = 0.06
# Rounding at the ends of the tested ranges: 0.333 stands for 1/3.
EDGE = 1e-3


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        compute: Training FLOPs, C.
        seq_length: Tokens per sequence, L.
        active_params: N_act as the law takes it.
        model: The backbone; its K and A do not matter.
        max_params, max_layers: Limits of the whole model.
        anchor_stride: A, where it is given.
        ratio: Whether N/N_act counts "params" or "layers".
        stages: Pipeline stages the model must be cut into.
    """

    compute: float
    seq_length: int
    active_params: float
    model: ModelConfig
    max_params: float | None = None
    max_layers: int | None = None
    anchor_stride: float | None = None
    ratio: str = "params"
    stages: int = 1

    def __post_init__(self):
        for name in ("compute", "seq_length", "active_params", "max_params", "max_layers", "anchor_stride", "stages"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise UserError(f"--{name.replace('_', '-')} is {value:g}; it must be a finite number above 0.")
        if self.model.prefix_layers is None or self.model.prefix_layers >= self.model.active_layers:
            raise UserError("the backbone has no routed layers: model.prefix_layers must be a number below "
                            f"model.active_layers ({self.model.active_layers}).")


@cache
def _backbones() -> dict[float, ModelConfig]:
    """The paper's dense backbones by their label, N_act: 165m.yaml is 165e6."""
    units = {"m": 1e6, "b": 1e9}
    return {float(path.stem[:-1]) * units[path.stem[-1]]: load_config(["--config", str(path)]).model
            for path in sorted(_SIZES.glob("*.yaml"))}


def nearest_backbone(active_params: float) -> tuple[float, ModelConfig]:
    """The label (N_act) of the paper's backbone nearest in size, and its configuration.

    Raises:
        UserError: examples/configs/size is not there.
    """
    if not _backbones():
        raise UserError(f"{_SIZES} has no configurations. It comes with the checkout; run from one, or give --config.")
    return min(_backbones().items(), key=lambda item: abs(log(item[0] / active_params)))


def buildable(question: Question, domain: dict[str, tuple[float, float]]) -> list[ModelConfig]:
    """One configuration for each K and number of anchors that can be built within the limits.

    Args:
        domain: Range of K and A in the law's data; K up to twice as large are tried.

    Raises:
        UserError: nothing can be built.
    """
    low, high = domain["A"]
    refused: Counter = Counter()
    models: dict[tuple[int, int], ModelConfig] = {}
    for K in range(2, min(question.seq_length, int(2 * domain["K"][1])) + 1):
        if question.seq_length % K:
            continue
        given = question.anchor_stride
        strides = [given] if given else _strides_to_try(question.model, K, low, high)
        if not strides:
            refused[f"no A from {low:g} to {high:g} is a multiple of 1/K"] += 1
        for A in strides:
            model = replace(question.model, routing=replace(question.model.routing, K=K, A=A))
            reason = _refusal(question, model)
            if reason:
                refused[reason] += 1
                continue
            # With as many anchors the same layers are only shared out otherwise, which the law does not see.
            layout = K, flops.model_plan(model).dense_layers
            models[layout] = min(models.get(layout, model), model, key=_awkwardness)
    if not models:
        reasons = "; ".join(f"{reason.rstrip('.')} ({count} of the configurations)"
                            for reason, count in refused.most_common(3))
        raise UserError(f"no K and A can be built for L = {question.seq_length}: "
                        f"{reasons or 'L has no divisor in the range of K'}. Loosen the limits, or change L.")
    return list(models.values())


def _refusal(question: Question, model: ModelConfig) -> str | None:
    try:
        plan = flops.model_plan(model)
    except UserError as error:
        # A given A is the asker's to mend; one that the search tried is not.
        return str(error) if question.anchor_stride else "the active depth can't be cut into groups of A*K layers"
    if not plan.sparse_layers:
        return "no sparse layers are left"
    if question.max_layers and plan.layers > question.max_layers:
        return f"more than {question.max_layers} layers"
    if question.max_params and flops.total_params(model) > question.max_params:
        return f"more than {question.max_params:.4g} parameters"
    if plan.prefix_layers + len(plan.groups) < question.stages:
        return f"can't be cut into {question.stages} pipeline stages"
    return None


def _strides_to_try(model: ModelConfig, K: int, low: float, high: float) -> list[float]:
    """Every multiple of 1/K from `low` to `high`, up to where one group takes all the depth."""
    most = min(floor(high * K * (1 + EDGE)), max(model.active_layers * K, ceil(low * K)))
    return [n / K for n in range(max(1, ceil(low * K * (1 - EDGE))), most + 1)]


def _built_stride(model: ModelConfig) -> float:
    """A as built: sparse equivalents over the anchors of the routed depth (eq. 22)."""
    plan = flops.model_plan(model)
    return plan.sparse_layers / plan.K / (plan.dense_layers - model.prefix_layers)


def _awkwardness(model: ModelConfig) -> tuple[bool, int, float]:
    """Sorts the A that build the same: near to what is built, then round, then the nearest."""
    A = Fraction(model.routing.A).limit_denominator(model.routing.K)
    return law_stride(model) != model.routing.A, A.denominator, abs(A - _built_stride(model))


def law_stride(model: ModelConfig) -> float:
    """The A that the law is asked about."""
    built = _built_stride(model)
    return model.routing.A if abs(built / model.routing.A - 1) < _SAME_STRIDE else built


def built_ratio(question: Question, model: ModelConfig) -> float:
    """N/N_act of a configuration."""
    if question.ratio == "layers":
        return flops.model_plan(model).layers / model.active_layers
    return flops.total_params(model) / flops.active_params(model)


def continuous_ratio(question: Question, K: np.ndarray, A: float) -> np.ndarray:
    """N/N_act for real K: H/(A+1) groups, whole or not (eq. 4, 5, 19)."""
    model = question.model
    groups = (model.active_layers - model.prefix_layers) / (A + 1)
    layers = model.prefix_layers + groups * (1 + A * K)
    if question.ratio == "layers":
        return layers / model.active_layers
    matrices = flops.layer_matrices(model)
    outside = flops.active_params(replace(model, prefix_layers=None)) - matrices * model.active_layers
    return (matrices * layers + outside) / (matrices * model.active_layers + outside)
