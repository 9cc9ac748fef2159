"""The pictures of a sweep's report."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from megatron_xmod.plotting import GREY, grid_of_axes, log_ticks
from megatron_xmod.sweep.compare import AXES, LOSSES, Curve
from megatron_xmod.sweep.identity import is_dense

AXIS_NAMES = {"tokens": "tokens", "flops": "training FLOPs"}
LOSS_NAMES = {"loss_causal": "causal", "loss_topk": "top-k"}
# The first validations, near the logarithm of the vocabulary, would press all curves together.
_SHOWN_FROM = 0.1


def loss_curves(variants: dict[str, list[Curve]]) -> Figure:
    """Loss over tokens and over training FLOPs, causal above, top-k below: seeds thin, their mean thick."""
    figure, axes = grid_of_axes(4, width=5.6, height=4.0, columns=2)
    colours = _colours(variants)
    for ax, (loss, axis) in zip(axes, [(loss, axis) for loss in LOSSES for axis in AXES], strict=True):
        for name, curves in variants.items():
            style = {"color": colours[name], "linestyle": "--" if is_dense(curves[0].run.config) else "-"}
            for curve in curves if len(curves) > 1 else ():
                ax.plot(curve.points[axis], curve.points[loss], linewidth=0.6, alpha=0.6, **style)
            x, y = _mean(curves, axis, loss)
            ax.plot(x, y, linewidth=2, label=name, marker="o" if len(x) < 3 else None, **style)
        _limits(ax, variants, axis, loss)
        ax.set(xlabel=AXIS_NAMES[axis], ylabel=f"validation loss, {LOSS_NAMES[loss]} (nats per token)", xscale="log")
        ax.grid(alpha=0.25, which="both")
    _share_limits(axes)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8,
                  ncols=min(len(variants), 4))
    return figure


def gain_over_sparsity(lines: dict[str, list[tuple[int, float, float | None]]], axis: str) -> Figure:
    """Difference to dense over K, one line each: [(K, difference, standard error)]."""
    figure, (ax,) = grid_of_axes(1, width=8.4, height=4.6)
    for (name, points), colour in zip(lines.items(), _palette(len(lines)), strict=True):
        K, value, error = (np.array(column, dtype=float) for column in zip(*sorted(points), strict=True))
        ax.errorbar(K, value, np.nan_to_num(error), marker="o", markersize=4, capsize=2, color=colour, label=name)
    ax.axhline(0, color=GREY, linewidth=1)
    log_ticks(ax, np.array([K for points in lines.values() for K, *_ in points], dtype=float))
    ax.set(xlabel="K", ylabel=f"causal loss minus dense at equal {AXIS_NAMES[axis]} (nats)")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _colours(variants: dict[str, list[Curve]]) -> dict[str, tuple]:
    """Dense is grey; the others have a colour each."""
    sparse = [name for name, curves in variants.items() if not is_dense(curves[0].run.config)]
    return {name: (0.35, 0.35, 0.35, 1) for name in variants} | dict(zip(sparse, _palette(len(sparse)), strict=True))


def _palette(count: int) -> list[tuple]:
    if count <= 7:  # the eighth of tab10 is the grey of dense
        return [colormaps["tab10"](i) for i in range(count)]
    return [colormaps["turbo"](0.05 + 0.9 * i / (count - 1)) for i in range(count)]


def _mean(curves: list[Curve], axis: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """Runs of one variant are validated at the same steps."""
    common = sorted(set.intersection(*(set(curve.points["step"]) for curve in curves)))
    picked = [[list(curve.points["step"]).index(step) for step in common] for curve in curves]
    losses = np.array([curve.points[loss][index] for curve, index in zip(curves, picked, strict=True)])
    return curves[0].points[axis][picked[0]], losses.mean(0)


def _limits(ax, variants: dict[str, list[Curve]], axis: str, loss: str) -> None:
    curves = [curve for curves in variants.values() for curve in curves]
    first = _SHOWN_FROM * max(curve.end(axis) for curve in curves)
    shown = np.concatenate([curve.points[loss][curve.points[axis] >= first] for curve in curves])
    if len(shown) > 1 and np.ptp(shown) > 0:
        margin = 0.05 * np.ptp(shown)
        ax.set_ylim(shown.min() - margin, shown.max() + margin)
        begin = min(curve.points[axis][curve.points[axis] >= first].min() for curve in curves
                    if (curve.points[axis] >= first).any())
        ax.set_xlim(begin / 1.05, max(curve.end(axis) for curve in curves) * 1.05)


def _share_limits(axes) -> None:
    """Causal and top-k on the same scale, so that their gap can be seen."""
    limits = np.array([ax.get_ylim() for ax in axes])
    for ax in axes:
        ax.set_ylim(limits[:, 0].min(), limits[:, 1].max())
