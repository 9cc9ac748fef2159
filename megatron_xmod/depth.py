"""The order of dense and sparse layers: (prefix, K, A, active depth) -> groups, rounds, counts. Pure Python.

Source: X-MoD (arXiv 2609.34212), eq. 3-5, 17-23, 36-38.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from megatron_xmod.errors import UserError


@dataclass(frozen=True)
class DepthPlan:
    """Layout of a model: `prefix_layers` dense layers, then groups of sparse layers, each closed by a dense anchor.

    Attributes:
        prefix_layers: Dense layers before the first group (N0); all layers for a dense model.
        K: Inverse token sparsity of the sparse layers.
        groups: Sparse layers of each group, its anchor not counted.
    """

    prefix_layers: int
    K: int
    groups: tuple[int, ...]

    @property
    def dense_layers(self) -> int:
        return self.prefix_layers + len(self.groups)

    @property
    def sparse_layers(self) -> int:
        return sum(self.groups)

    @property
    def layers(self) -> int:
        return self.dense_layers + self.sparse_layers

    @property
    def active_layers(self) -> Fraction:
        """Layers an average token passes (eq. 5)."""
        return self.dense_layers + Fraction(self.sparse_layers, self.K)

    def rounds(self, group: int) -> tuple[int, ...]:
        """Sizes of the rounds of a group: as many of K layers as there are, then the rest."""
        full, rest = divmod(self.groups[group], self.K)
        return (self.K,) * full + ((rest,) if rest else ())


def plan_depth(active_layers: int, prefix_layers: int | None, K: int, A: float) -> DepthPlan:
    """The layout with a given active depth.

    With H = active_layers - prefix_layers there are N1 = ceil(H / (A+1)) groups. They share the H - N1 sparse
    equivalents, A each; the first group takes the remainder.

    Args:
        active_layers: Layers an average token passes.
        prefix_layers: Dense prefix N0; None makes every layer dense.
        K: Inverse token sparsity, at least 1.
        A: Anchor stride, above 0; A*K must be an integer.

    Raises:
        UserError: for a layout that can't be built, naming the nearest that can.
    """
    if prefix_layers is None or prefix_layers == active_layers:
        return DepthPlan(active_layers, K, ())
    if not 0 <= prefix_layers < active_layers:
        raise UserError(f"model.prefix_layers is {prefix_layers}; it must be between 0 and model.active_layers "
                        f"({active_layers}).")
    if K < 1 or A <= 0:
        raise UserError(f"model.routing.K is {K} and model.routing.A is {A}; K must be at least 1 and A above 0.")
    stride = _exact(A, K)
    horizon = active_layers - prefix_layers
    group_count, first = _first_group(horizon, stride)
    if first < 0 or (first * K).denominator != 1:
        raise UserError(_remainder_message(active_layers, prefix_layers, K, stride, first))
    sizes = (int(first * K),) + (int(stride * K),) * (group_count - 1)
    # A remainder of 0 would be a group without sparse layers: just a dense layer, which belongs to the prefix.
    extra = sizes[:1] == (0,)
    return DepthPlan(prefix_layers + extra, K, sizes[extra:])


def _first_group(horizon: int, stride: Fraction) -> tuple[int, Fraction]:
    """Number of groups, and the sparse equivalents left for the first one (below 0: the depth can't be reached)."""
    group_count = ceil(horizon / (stride + 1))
    return group_count, horizon - group_count - (group_count - 1) * stride


def _exact(A: float, K: int) -> Fraction:
    """A as a multiple of 1/K; 0.333 is taken as 1/3 where K is 3."""
    layers = round(A * K)
    if layers < 1 or abs(A * K - layers) > 1e-3:
        below, above = max(1, int(A * K)), int(A * K) + 1
        near = " or ".join(f"{n / K:g}" for n in sorted({below, above}))
        raise UserError(f"model.routing.A*K must be an integer, the sparse layers of a group, but A = {A:g} and "
                        f"K = {K} give {A * K:g}. The nearest A that work: {near}.")
    return Fraction(layers, K)


def _remainder_message(active: int, prefix: int, K: int, stride: Fraction, first: Fraction) -> str:
    reachable = []
    for distance in range(1, active + 1):
        for depth in (active - distance, active + distance):
            horizon = depth - prefix
            if horizon < 1:
                continue
            _, left = _first_group(horizon, stride)
            if left >= 0 and (left * K).denominator == 1:
                reachable.append(depth)
        if reachable:
            break
    near = " or ".join(map(str, reachable)) or "none near"
    return (f"model.active_layers = {active} can't be reached with prefix_layers = {prefix}, A = {float(stride):g}, "
            f"K = {K}: the first group would have {float(first * K):g} sparse layers. Active depths that work: {near}.")
