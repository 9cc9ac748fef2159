"""Reading CSV tables of runs: numbers are checked, and every row that is left out is named with its reason."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_xmod.errors import UserError

Row = dict[str, str]


@dataclass
class Table:
    """Rows that can be used, with their line numbers, and what was left out ("line 7: loss is nan")."""

    path: str
    rows: list[Row]
    lines: list[int]
    left_out: list[str] = field(default_factory=list)

    def drop(self, reasons: dict[int, str]) -> None:
        """Leaves out rows by position, each with its reason."""
        self.left_out += [f"line {self.lines[i]}: {reason}" for i, reason in reasons.items()]
        kept = [i for i in range(len(self.rows)) if i not in reasons]
        self.rows, self.lines = [self.rows[i] for i in kept], [self.lines[i] for i in kept]

    def pick(self, positions: Sequence[int]) -> Table:
        """Some of the rows; what is left out of either table is named in the same list."""
        return Table(self.path, [self.rows[i] for i in positions], [self.lines[i] for i in positions], self.left_out)

    def numbers(self, column: str) -> np.ndarray:
        """A column whose numbers were checked [n]."""
        return np.array([float(row[column]) for row in self.rows])

    def require_positive(self, columns: Sequence[str]) -> None:
        """Leaves out rows where one of the columns is not a positive, finite number."""
        self.drop({i: reason for i, row in enumerate(self.rows) if (reason := _wrong(row, columns))})

    def require_at_least(self, least: float, columns: Sequence[str]) -> None:
        """Leaves out rows where one of the columns is not a finite number from `least` on."""
        self.drop({i: reason for i, row in enumerate(self.rows) if (reason := _wrong(row, columns, least))})

    def drop_duplicates(self, columns: Sequence[str]) -> None:
        """Keeps the first of the rows that agree in all the columns."""
        first: dict[tuple, int] = {}
        reasons = {}
        for i, row in enumerate(self.rows):
            key = tuple(_canonical(row.get(name, "")) for name in columns)
            if key in first:
                reasons[i] = f"a duplicate of line {self.lines[first[key]]} (same {', '.join(columns)})"
            first.setdefault(key, i)
        self.drop(reasons)

    def drop_failed(self) -> None:
        """Leaves out rows whose status, where the table has one, says that the run did not end well."""
        good = ("", "ok", "done", "completed")
        self.drop({i: f"status is {row['status']}" for i, row in enumerate(self.rows)
                   if (row.get("status") or "").strip().lower() not in good})


def read_table(path: str | Path, columns: Sequence[str]) -> Table:
    """A CSV file, gzip by its name.

    Args:
        columns: Names that the header must have.

    Raises:
        UserError: the file can't be read, lacks columns, or has no rows.
    """
    try:
        opener = gzip.open if str(path).endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as stream:  # spreadsheets write the mark
            reader = csv.DictReader(stream, restkey="")
            header = reader.fieldnames or []
            missing = [name for name in columns if name not in header]
            if missing:
                raise UserError(f"{path} lacks the columns {', '.join(missing)}; its header has "
                                f"{', '.join(header) or 'nothing'}.")
            table = Table(str(path), [], [])
            for row in reader:
                table.rows.append(row)
                table.lines.append(reader.line_num)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}.") from error
    except (UnicodeDecodeError, csv.Error, EOFError) as error:
        raise UserError(f"{path} is not a CSV table in UTF-8: {error}.") from error
    if not table.rows:
        raise UserError(f"{path} has a header but no rows.")
    _drop_ragged(table)
    return table


def _drop_ragged(table: Table) -> None:
    reasons = {}
    for i, row in enumerate(table.rows):
        if "" in row:
            reasons[i] = "it has more fields than the header"
        elif None in row.values():
            reasons[i] = "it has fewer fields than the header"
    table.drop(reasons)


def is_positive(text: str | None) -> bool:
    """Whether a field holds a positive, finite number."""
    return _wrong({"": text or ""}, [""]) is None


def _wrong(row: Row, columns: Sequence[str], least: float | None = None) -> str | None:
    """Why a row can't be used: a column is no finite number from `least` on, or without it no positive one."""
    for name in columns:
        text = row[name].strip()
        try:
            value = float(text)
        except ValueError:
            return f"{name} is {text!r}, not a number" if text else f"{name} is empty"
        if not math.isfinite(value) or (value <= 0 if least is None else value < least):
            return f"{name} is {text}; it must be a " + (
                "positive number" if least is None else f"number of at least {least:g}")
    return None


def _canonical(text: str) -> str:
    """Numbers that are equal get the same text."""
    try:
        return f"{float(text):.12g}"
    except ValueError:
        return text.strip()
