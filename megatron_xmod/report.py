"""A report: Markdown with pictures beside it, and the same text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_xmod.runtime.files import write_atomically


class Report:
    """Text and pictures, in the order they are added."""

    def __init__(self, title: str):
        self.title = title
        self._blocks: list[str] = []
        self._pictures: dict[str, Any] = {}

    def text(self, *paragraphs: str) -> None:
        self._blocks += paragraphs

    def heading(self, text: str) -> None:
        self._blocks.append(f"## {text}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table whose columns line up in plain text too; numbers get 5 significant digits."""
        cells = [list(header)] + [[_cell(value) for value in row] for row in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
                 for row in cells]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        self._blocks.append("\n".join(lines))

    def picture(self, name: str, caption: str, figure: Any) -> None:
        """A matplotlib figure, saved as `name`.png beside the report."""
        self._pictures[name] = figure
        self._blocks.append(f"![{caption}]({name}.png)\n\n*{caption}*")

    def left_out(self, rows: Sequence[str], shown: int = 20) -> None:
        """Names the rows that were not used."""
        if not rows:
            self.text("Every row of the table was used.")
            return
        more = [f"- and {len(rows) - shown} more"] if len(rows) > shown else []
        self.text(f"Rows left out: {len(rows)}", "\n".join([f"- {row}" for row in rows[:shown]] + more))

    def __str__(self) -> str:
        """The text without the pictures."""
        return "\n\n".join([self.title, *(b for b in self._blocks if not b.startswith("!["))])

    def write(self, folder: Path) -> Path:
        """Writes report.md and its pictures; returns the path of report.md. Raises UserError where it can't."""
        from megatron_xmod.plotting import save

        for name, figure in self._pictures.items():
            save(figure, folder / f"{name}.png")
        path = folder / "report.md"
        write_atomically(path, "\n\n".join([f"# {self.title}", *self._blocks]) + "\n")
        return path


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
