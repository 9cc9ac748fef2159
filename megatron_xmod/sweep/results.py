"""The tables of a sweep: one row per run, one row per validation."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_xmod.flops import active_params, model_plan, total_params
from megatron_xmod.runtime.files import write_atomically
from megatron_xmod.sweep.compare import Curve, Pairs, dense_curves, dense_reference, group_key, groups
from megatron_xmod.sweep.identity import is_dense
from megatron_xmod.sweep.plan import Run
from megatron_xmod.sweep.state import DONE, State

# `loss` is the causal one: what tools/fit_law.py fits. A column of a run that is not done is empty where it would tell
# a result. dense_loss and dense_tokens are read from the dense runs' curves at the same C.
COLUMNS = ("run", "variant", "seed", "status", "config_hash", "N", "N_act", "ratio", "L", "K", "A", "C", "tokens",
           "loss", "loss_causal", "loss_topk", "gap", "seconds", "layers", "dense_loss", "dense_tokens", "error")
CURVE_COLUMNS = ("run", "step", "tokens", "flops", "loss_causal", "loss_topk")


def write_tables(output: Path, pairs: Pairs) -> None:
    """Writes runs.csv and curves.csv, each whole or not at all."""
    dense = {key: dense_curves(variants) for key, variants in groups(pairs).items()}
    rows = (_row(run, state, dense.get(group_key(run), [])) for run, state in pairs)
    write_atomically(output / "runs.csv", _csv(COLUMNS, rows))
    write_atomically(output / "curves.csv", _csv(CURVE_COLUMNS, (row for pair in pairs for row in _curve(*pair))))


def _row(run: Run, state: State, dense: list[Curve]) -> dict[str, Any]:
    model = run.config.model
    N, N_act, plan = total_params(model), active_params(model), model_plan(model)
    row = {"run": run.name, "variant": run.variant, "seed": run.seed, "status": state.status, "config_hash": run.hash,
           "N": N, "N_act": N_act, "ratio": N / N_act, "L": run.config.data.seq_length,
           "K": 1 if is_dense(run.config) else plan.K, "A": "" if is_dense(run.config) else model.routing.A,
           "layers": plan.layers, "error": state.error}
    if state.status != DONE:
        return row
    last = state.validation[-1]
    row |= {"C": last["step"] * run.flops_per_step, "tokens": last["step"] * run.tokens_per_step,
            "loss": last["loss_causal"], "loss_causal": last["loss_causal"], "loss_topk": last["loss_topk"],
            "gap": last["loss_causal"] - last["loss_topk"], "seconds": state.seconds}
    if not is_dense(run.config):
        row |= dense_reference(dense, row["C"])
    return row


def _curve(run: Run, state: State) -> Iterable[dict[str, Any]]:
    for found in state.validation:
        yield {"run": run.name, "step": found["step"], "tokens": found["step"] * run.tokens_per_step,
               "flops": found["step"] * run.flops_per_step, "loss_causal": found["loss_causal"],
               "loss_topk": found["loss_topk"]}


def _csv(columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
