"""Which anchor strides to try, and which stride a layout really has."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

from megatron_xmod import flops
from megatron_xmod.config.schema import ModelConfig

# A built A this near to the one asked for passes for it: the paper's A = 4 on 28 layers is 3.8 built.
_SAME_STRIDE = 0.06
# Rounding at the ends of the tested ranges: 0.333 stands for 1/3.
EDGE = 1e-3


def strides_to_try(model: ModelConfig, K: int, low: float, high: float) -> list[float]:
    """Every multiple of 1/K from `low` to `high`, up to where one group takes all the depth."""
    most = min(floor(high * K * (1 + EDGE)), max(model.active_layers * K, ceil(low * K)))
    return [n / K for n in range(max(1, ceil(low * K * (1 - EDGE))), most + 1)]


def _built_stride(model: ModelConfig) -> float:
    """A as built: sparse equivalents over the anchors of the routed depth (eq. 22)."""
    plan = flops.model_plan(model)
    return plan.sparse_layers / plan.K / (plan.dense_layers - model.prefix_layers)


def awkwardness(model: ModelConfig) -> tuple[bool, int, float]:
    """Sorts the A that build the same: near to what is built, then round, then the nearest."""
    A = Fraction(model.routing.A).limit_denominator(model.routing.K)
    return law_stride(model) != model.routing.A, A.denominator, abs(A - _built_stride(model))


def law_stride(model: ModelConfig) -> float:
    """The A that the law is asked about."""
    built = _built_stride(model)
    return model.routing.A if abs(built / model.routing.A - 1) < _SAME_STRIDE else built
