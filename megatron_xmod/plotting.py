"""What the pictures of all reports share: figures without a display, axes, ticks, PNG files written whole."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megatron_xmod.runtime.files import write_atomically

BLUE, ORANGE, GREY = "#2a6fbb", "#d1622b", "#888888"


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG whole or not at all. Raises UserError where it can't."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(path, picture.getvalue())


def grid_of_axes(count: int, width: float = 4.2, height: float = 4.0, columns: int = 3):
    """A figure and its `count` axes, at most `columns` in a row; sizes in inches of one of them."""
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def log_ticks(ax, value: np.ndarray) -> None:
    """A logarithmic axis with ticks at the values themselves where they are few, or at powers of two."""
    ax.set_xscale("log")
    ticks = np.unique(value)
    if len(ticks) > 7 and ticks[-1] < 1000:
        ticks = 2.0 ** np.arange(np.ceil(np.log2(ticks[0])), np.log2(ticks[-1]) + 1e-9)
    if len(ticks) <= 10:
        ax.set_xticks(ticks, _labels(ticks), fontsize=8)
        ax.set_xticks([], minor=True)
    else:
        ax.tick_params(axis="x", which="minor", labelbottom=False)


def _labels(ticks: np.ndarray) -> list[str]:
    """Names of ticks on a logarithmic axis; none where it would run into the one before."""
    place = np.log(ticks / ticks[0]) / max(np.log(ticks[-1] / ticks[0]), 1e-9)
    labels: list[str] = []
    last = 0
    for i, tick in enumerate(ticks):
        labels.append(short(tick))
        # Shares of the axis' width: a letter, and the gap between two labels.
        if i and place[i] - place[last] < 0.021 * (len(labels[i]) + len(labels[last])) / 2 + 0.02:
            labels[i] = ""
        else:
            last = i
    return labels


def short(value: float) -> str:
    """556M, 1.65B, 32k (of 1024: up to 8 times a power of two of them), 3e+19."""
    if 1024 <= value < 1e7 and value % 1024 == 0 and value / 1024 <= 8 * (int(value / 1024) & -int(value / 1024)):
        return f"{value / 1024:g}k"
    if 1e6 <= value < 1e12:
        return f"{value / 1e6:.3g}M" if value < 999.5e6 else f"{value / 1e9:.3g}B"
    return f"{value:g}"
