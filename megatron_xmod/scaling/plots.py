"""The pictures of the reports and of the chooser, as PNG files. matplotlib without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_xmod.runtime.files import PendingFile

_BLUE, _ORANGE, _GREY = "#2a6fbb", "#d1622b", "#888888"

Panel = tuple[str, np.ndarray, np.ndarray]  # title, measured [n], predicted [n]


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG whole or not at all. Raises UserError where it can't."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    file = PendingFile(path)
    try:
        file.write(picture.getvalue())
        file.seal()
        file.publish()
    finally:
        file.discard()


def _axes(count: int, width: float = 4.2, height: float = 4.0):
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def predicted_and_measured(panels: Sequence[Panel], quantity: str, band: float | None = None) -> Figure:
    """One panel each, predicted over measured; the line is a perfect fit, the band is +- `band` about it."""
    figure, axes = _axes(len(panels))
    for ax, (title, measured, predicted) in zip(axes, panels, strict=True):
        ends = np.array([min(measured.min(), predicted.min()), max(measured.max(), predicted.max())])
        ends = ends + np.array([-0.04, 0.04]) * max(float(np.ptp(ends)), 1e-6)
        ax.plot(ends, ends, color=_GREY, linewidth=1)
        if band:
            ax.fill_between(ends, ends - band, ends + band, color=_GREY, alpha=0.2, linewidth=0)
        ax.scatter(measured, predicted, s=14, color=_BLUE, alpha=0.7, linewidths=0)
        ax.set(title=title, xlabel=f"measured {quantity}", ylabel=f"predicted {quantity}", xlim=ends, ylim=ends)
    return figure


def residuals(values: dict[str, np.ndarray], error: np.ndarray, quantity: str) -> Figure:
    """Predicted minus measured over each variable, on logarithmic axes where it spans more than a factor 3."""
    figure, axes = _axes(len(values), height=3.2)
    for ax, (name, value) in zip(axes, values.items(), strict=True):
        ax.axhline(0, color=_GREY, linewidth=1)
        ax.scatter(value, error, s=14, color=_BLUE, alpha=0.7, linewidths=0)
        if value.min() > 0 and value.max() > 3 * value.min():
            _log_ticks(ax, value)
        ax.set(xlabel=name, ylabel=f"predicted - measured {quantity}")
    return figure


def _log_ticks(ax, value: np.ndarray) -> None:
    """A logarithmic axis with ticks at the values themselves where they are few, or at powers of two."""
    ax.set_xscale("log")
    ticks = np.unique(value)
    if len(ticks) > 7 and ticks[-1] < 1000:
        ticks = 2.0 ** np.arange(np.ceil(np.log2(ticks[0])), np.log2(ticks[-1]) + 1e-9)
    if len(ticks) <= 10:
        ax.set_xticks(ticks, [_short(v) for v in ticks], fontsize=8)
        ax.set_xticks([], minor=True)
    else:
        ax.tick_params(axis="x", which="minor", labelbottom=False)


def _short(value: float) -> str:
    """556M, 1.65B, 32k (of 1024), 3e+19."""
    if value >= 1024 and value % 1024 == 0 and value < 1e7:
        return f"{value / 1024:g}k"
    if 1e6 <= value < 1e12:
        return f"{value / 1e6:.3g}M" if value < 999.5e6 else f"{value / 1e9:.3g}B"
    return f"{value:g}"


def parameter_intervals(params: dict[str, float], intervals: dict[str, tuple[float, float]],
                        draws: dict[str, np.ndarray]) -> Figure:
    """A histogram of the bootstrap refits for each parameter, with its estimate and its interval."""
    figure, axes = _axes(len(params), height=2.6)
    for ax, name in zip(axes, params, strict=True):
        low, high = intervals[name]
        # Not far beyond the interval's ends: single wild refits would squeeze the rest into one bar.
        margin = 0.5 * (high - low) or 1e-9
        shown = draws[name][(draws[name] >= low - margin) & (draws[name] <= high + margin)]
        ax.hist(shown, bins=40, color=_BLUE, alpha=0.5)
        ax.axvspan(low, high, color=_GREY, alpha=0.2, linewidth=0)
        ax.axvline(params[name], color=_ORANGE)
        ax.set(title=name, yticks=[])
        ax.xaxis.set_major_locator(MaxNLocator(4))
    return figure


def profiles(curves: dict[str, tuple[np.ndarray, np.ndarray]], estimates: dict[str, float], limit: float) -> Figure:
    """Loss of fit over each held exponent: relative rise of the squared error, and the level that rejects."""
    figure, axes = _axes(len(curves), height=2.8)
    for ax, (name, (value, rise)) in zip(axes, curves.items(), strict=True):
        ax.plot(value, rise, color=_BLUE)
        ax.axhline(limit, color=_GREY, linestyle="--", linewidth=1)
        ax.axvline(estimates[name], color=_ORANGE)
        ax.set(title=name, xlabel="held at", ylabel="rise of squared error", ylim=(0, 3 * limit))
    return figure


def choice(K: Sequence[int], A: Sequence[float], delta: np.ndarray, best: tuple[int, float] | None,
           curve: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], stride: float, tested: tuple[float, float],
           built: tuple[np.ndarray, np.ndarray]) -> Figure:
    """Left: delta over what can be built, [len(A), len(K)], not a number where it can't. Right: delta over real K at
    one A, as (K, delta, low, high), with the configurations that can be built and the tested range of K."""
    figure, (left, right) = _axes(2, width=5.6, height=4.2)
    size = float(np.nanmax(np.abs(delta)))
    image = left.imshow(delta, cmap="RdBu_r", vmin=-size, vmax=size, aspect="auto", origin="lower")
    figure.colorbar(image, ax=left, label="predicted loss against dense (nats)")
    left.set(title="configurations that can be built", xlabel="K", ylabel="A", xticks=range(len(K)),
             xticklabels=[str(k) for k in K], yticks=range(len(A)), yticklabels=[f"{a:g}" for a in A])
    for (row, column), value in np.ndenumerate(delta):
        if np.isfinite(value):
            mark = "*" if best == (K[column], A[row]) else ""
            left.text(column, row, f"{value:+.3f}{mark}", ha="center", va="center", fontsize=8,
                      color="white" if abs(value) > 0.6 * size else "black", fontweight="bold" if mark else "normal")
    at, value, low, high = curve
    right.axvspan(*tested, color=_GREY, alpha=0.12, linewidth=0, label="K of the law's data")
    right.fill_between(at, low, high, color=_BLUE, alpha=0.25, linewidth=0, label="80 % interval")
    right.plot(at, value, color=_BLUE, label="law")
    right.scatter(*built, color=_ORANGE, zorder=3, s=24, label="can be built")
    right.axhline(0, color=_GREY, linewidth=1)
    right.set(title=f"A = {stride:g}", xlabel="K", ylabel="predicted loss against dense (nats)", xscale="log")
    ticks = [2**i for i in range(1 + int(np.log2(at.max())))]
    right.set_xticks(ticks, [str(t) for t in ticks])
    right.set_xticks([], minor=True)
    right.legend(fontsize=8)
    return figure
