"""What lies in the folder of a run, and what that says about it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_xmod.config.load import load_config
from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import write_atomically, write_errors
from megatron_xmod.sweep.identity import differences
from megatron_xmod.sweep.plan import Run

DONE, FAILED, UNFINISHED, WAITING = "done", "failed", "unfinished", "waiting"
_FAILURE = "failure.json"


@dataclass(frozen=True)
class State:
    """How far a run is.

    Attributes:
        status: done; failed (its last attempt); unfinished (it will resume); waiting (nothing is there).
        validation: Of each evaluation: step, loss_causal, loss_topk (nats per token) and more.
        seconds: Spent in training steps, over all attempts; evaluation, saving and start-up are not in it.
        error: Last error line of a failed run.
        changed: Settings in which the folder's run differs from the one wanted; then it is of no use.
    """

    status: str
    validation: list[dict[str, Any]] = field(default_factory=list)
    seconds: float | None = None
    error: str = ""
    changed: tuple[str, ...] = ()


def read_state(run: Run) -> State:
    """Looks into the folder of a run."""
    failure = _read_json(run.folder / _FAILURE)
    failed = State(FAILED, error=failure["error"]) if failure and failure["config_hash"] == run.hash else None
    if not (run.folder / "config.yaml").exists():
        return failed or State(WAITING)
    changed = _changed(run)
    if changed:
        return failed or State(WAITING, changed=changed)
    summary = _read_json(run.folder / "summary.json")
    if summary and summary["final"].get("finished") and summary["final"]["step"] == run.config.train.steps:
        return State(DONE, summary["validation"], _training_seconds(run.folder / "metrics.jsonl"))
    return failed or State(UNFINISHED)


def record_failure(run: Run, error: str) -> None:
    write_atomically(run.folder / _FAILURE, json.dumps({"config_hash": run.hash, "error": error}) + "\n")


def prepare_folder(run: Run) -> str | None:
    """Makes the folder ready for an attempt. A run with other settings is put aside; returns its new place."""
    (run.folder / _FAILURE).unlink(missing_ok=True)
    if not (run.folder / "config.yaml").exists() or not _changed(run):
        return None
    number = 1
    while (aside := run.folder.with_name(f"{run.folder.name}.old{number}")).exists():
        number += 1
    with write_errors(run.folder):
        os.rename(run.folder, aside)
    return str(aside)


def _changed(run: Run) -> tuple[str, ...]:
    try:
        there = load_config(["--config", str(run.folder / "config.yaml")])
    except UserError as error:
        return (str(error),)
    return tuple(differences(there, run.config))


def _training_seconds(metrics: Path) -> float | None:
    """The time between two log lines is their tokens over the speed that the later one tells."""
    seconds, tokens = 0.0, 0
    try:
        for line in metrics.read_text().splitlines():
            entry = json.loads(line)
            seconds += (entry["tokens"] - tokens) / entry["tokens_per_second"]
            tokens = entry["tokens"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    return seconds


def _read_json(path: Path) -> dict | None:
    try:
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else None
    except (OSError, ValueError):
        return None
