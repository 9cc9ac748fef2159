"""The pictures of the reports of fits and of the chooser."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from megatron_xmod.plotting import BLUE, GREY, ORANGE, grid_of_axes, log_ticks

Panel = tuple[str, np.ndarray, np.ndarray]  # title, measured [n], predicted [n]

# An interval over a larger factor than this is drawn on a logarithmic axis.
_WIDE = 15.0


def predicted_and_measured(panels: Sequence[Panel], quantity: str, band: float | None = None) -> Figure:
    """One panel each, predicted over measured; the line is a perfect fit, the band is +- `band` about it."""
    figure, axes = grid_of_axes(len(panels))
    for ax, (title, measured, predicted) in zip(axes, panels, strict=True):
        ends = np.array([min(measured.min(), predicted.min()), max(measured.max(), predicted.max())])
        ends = ends + np.array([-0.04, 0.04]) * max(float(np.ptp(ends)), 1e-6)
        ax.plot(ends, ends, color=GREY, linewidth=1)
        if band:
            ax.fill_between(ends, ends - band, ends + band, color=GREY, alpha=0.2, linewidth=0)
        ax.scatter(measured, predicted, s=14, color=BLUE, alpha=0.7, linewidths=0)
        ax.set(title=title, xlabel=f"measured {quantity}", ylabel=f"predicted {quantity}", xlim=ends, ylim=ends)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5))
    return figure


def residuals(values: dict[str, np.ndarray], error: np.ndarray, quantity: str) -> Figure:
    """Predicted minus measured over each variable, on logarithmic axes where it has few values or spans a factor 3."""
    figure, axes = grid_of_axes(len(values), height=3.2)
    for ax, (name, value) in zip(axes, values.items(), strict=True):
        ax.axhline(0, color=GREY, linewidth=1)
        ax.scatter(value, error, s=14, color=BLUE, alpha=0.7, linewidths=0)
        if value.min() > 0 and (value.max() > 3 * value.min() or len(np.unique(value)) <= 10):
            log_ticks(ax, value)
        else:
            ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.set(xlabel=name, ylabel=f"predicted - measured {quantity}")
    return figure


def parameter_intervals(params: dict[str, float], intervals: dict[str, tuple[float, float]],
                        draws: dict[str, np.ndarray]) -> Figure:
    """A histogram of the bootstrap refits for each parameter, with its estimate and its interval."""
    figure, axes = grid_of_axes(len(params), height=2.6)
    for ax, name in zip(axes, params, strict=True):
        low, high = intervals[name]
        # Not far beyond the interval's ends: single wild refits would squeeze the rest into one bar.
        wide = low > 0 and high > _WIDE * low
        if wide:
            factor = (high / low) ** 0.3
            near = low / factor, high * factor
        else:
            margin = 0.5 * (high - low) or 1e-9
            near = low - margin, high + margin
        shown = draws[name][(draws[name] >= near[0]) & (draws[name] <= near[1])]
        ax.hist(shown, bins=np.geomspace(shown.min(), shown.max(), 41) if wide else 40, color=BLUE, alpha=0.5)
        if wide:
            ax.set_xscale("log")
        else:
            ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.axvspan(low, high, color=GREY, alpha=0.2, linewidth=0)
        ax.axvline(params[name], color=ORANGE)
        ax.set(title=name, yticks=[])
    return figure


def profiles(curves: dict[str, tuple[np.ndarray, np.ndarray]], estimates: dict[str, float], limit: float) -> Figure:
    """Loss of fit over each held exponent: relative rise of the squared error, and the level that rejects."""
    figure, axes = grid_of_axes(len(curves), height=2.8)
    for ax, (name, (value, rise)) in zip(axes, curves.items(), strict=True):
        ax.plot(value, rise, color=BLUE)
        ax.axhline(limit, color=GREY, linestyle="--", linewidth=1)
        ax.axvline(estimates[name], color=ORANGE)
        ax.set(title=name, xlabel="held at", ylabel="rise of squared error", ylim=(0, 3 * limit))
    return figure


def choice(K: Sequence[int], A: Sequence[float], delta: np.ndarray, inside: np.ndarray,
           best: tuple[int, float] | None, curve: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], stride: float,
           tested: tuple[float, float] | None, built: tuple[np.ndarray, np.ndarray], size: float) -> Figure:
    """Left: delta over what can be built, [len(A), len(K)], not a number where it can't, and which of it is inside the
    law's data; the colours go from -`size` to `size`. Right: delta over real K at one A, as (K, delta, low, high), with
    the configurations that can be built and the range of K that was tested at that A."""
    figure, (left, right) = grid_of_axes(2, width=5.6, height=4.2)
    image = left.imshow(delta, cmap="RdBu_r", vmin=-size, vmax=size, aspect="auto", origin="lower")
    figure.colorbar(image, ax=left, label="predicted loss against dense (nats)",
                    extend="both" if np.nanmax(np.abs(delta)) > size else "neither")
    left.set_facecolor("#d9d9d9")
    left.set_title("* best; hatched: outside the law's data; grey: can't be built", fontsize=10)
    left.set(xlabel="K", ylabel="A", xticks=range(len(K)), xticklabels=[str(k) for k in K], yticks=range(len(A)),
             yticklabels=[f"{a:g}" for a in A])
    for (row, column), value in np.ndenumerate(delta):
        if not np.isfinite(value):
            continue
        if not inside[row, column]:
            cell = (column - 0.5, row - 0.5), 1, 1
            left.add_patch(Rectangle(*cell, fill=False, hatch="/", edgecolor=GREY, linewidth=0))
        mark = "*" if best == (K[column], A[row]) else ""
        left.text(column, row, f"{value:+.3f}{mark}", ha="center", va="center", fontsize=8 if len(K) <= 7 else 6.5,
                  color="white" if abs(value) > 0.6 * size else "black", fontweight="bold" if mark else "normal")
    at, value, low, high = curve
    if tested:
        right.axvspan(*tested, color=GREY, alpha=0.12, linewidth=0, label="K of the law's data")
    right.fill_between(at, low, high, color=BLUE, alpha=0.25, linewidth=0, label="80 % interval")
    right.plot(at, value, color=BLUE, label="law")
    right.scatter(*built, color=ORANGE, zorder=3, s=24, label="can be built")
    right.axhline(0, color=GREY, linewidth=1)
    right.set(title=f"A = {stride:g}", xlabel="K", ylabel="predicted loss against dense (nats)", xscale="log")
    ticks = [2**i for i in range(1 + int(np.log2(at.max())))]
    right.set_xticks(ticks, [str(t) for t in ticks])
    right.set_xticks([], minor=True)
    right.legend(fontsize=8)
    return figure
