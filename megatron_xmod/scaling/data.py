"""The three kinds of tables that can be fitted: Chinchilla's runs, routed language models, and X-MoD sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.references import DenseCurves
from megatron_xmod.scaling.separable import Runs
from megatron_xmod.scaling.table import Table, read_table


@dataclass(frozen=True)
class Sweep:
    """Runs ready for a fit.

    Attributes:
        x: Variables of the laws, [n] each.
        loss: Validation loss, nats per token [n].
        clusters: What shares its errors, for the bootstrap [n].
        left_out: Rows not used, each with its line and reason.
        names: What people call each row [n].
    """

    x: Runs
    loss: np.ndarray
    clusters: np.ndarray
    left_out: list[str]
    names: np.ndarray

    def select(self, mask: np.ndarray) -> Sweep:
        return Sweep({name: v[mask] for name, v in self.x.items()}, self.loss[mask], self.clusters[mask],
                     self.left_out, self.names[mask])


def read_chinchilla(path: str | Path, drop_highest: int) -> Sweep:
    """Dense runs: columns "Model Size" (parameters), "Training FLOP", "loss"; tokens are C/6N.

    Args:
        drop_highest: How many of the highest losses are left out.
    """
    columns = ("Model Size", "Training FLOP", "loss")
    table = read_table(path, columns)
    table.require_positive(columns)
    table.drop_duplicates(columns)
    losses = table.numbers("loss")
    highest = np.argsort(losses, kind="stable")[len(losses) - min(drop_highest, len(losses)):]
    table.drop({int(i): f"its loss {losses[i]:.3f} is among the {drop_highest} highest" for i in sorted(highest)})
    N, C = table.numbers("Model Size"), table.numbers("Training FLOP")
    lines = np.array(table.lines)
    return Sweep({"N": N, "D": C / (6 * N), "C": C}, table.numbers("loss"), lines, table.left_out, lines)


def read_routed(path: str | Path, step: int | None = None) -> dict[str, Sweep]:
    """Routed language models by router: each run's last row, k = 1, routing_frequency 0.5, dense runs as 1 expert.

    Args:
        step: The step to use instead of the last.
    """
    columns = ("hyper_id", "step", "loss_validation", "num_experts", "k", "router_type", "routing_frequency",
               "dense_parameter_count")
    table = read_table(path, columns)
    # Other settings are no faults of the table, so they are passed over without being named.
    wanted = [i for i, row in enumerate(table.rows) if _is_one(row["k"], 1) and _is_one(row["routing_frequency"], 0.5)]
    table = Table(table.path, [table.rows[i] for i in wanted], [table.lines[i] for i in wanted], table.left_out)
    table.require_positive(("step", "num_experts", "dense_parameter_count"))
    table.drop_duplicates(("hyper_id", "step"))
    _keep_step(table, step)
    table.require_positive(("loss_validation",))
    routers = sorted({row["router_type"] for row in table.rows} - {"Dense"})
    if not routers:
        raise UserError(f"{path} has no routed runs with k = 1 and routing_frequency 0.5.")
    return {router: _one_router(table, router) for router in routers}


def _keep_step(table: Table, step: int | None) -> None:
    chosen: dict[str, int] = {}
    for i, row in enumerate(table.rows):
        now, run = float(row["step"]), row["hyper_id"]
        best = chosen.get(run)
        if (now == step) if step is not None else (best is None or now > float(table.rows[best]["step"])):
            chosen[run] = i
    kept = sorted(chosen.values())
    table.rows, table.lines = [table.rows[i] for i in kept], [table.lines[i] for i in kept]


def _one_router(table: Table, router: str) -> Sweep:
    mine = [i for i, row in enumerate(table.rows) if row["router_type"] in (router, "Dense")]
    part = Table(table.path, [table.rows[i] for i in mine], [table.lines[i] for i in mine], table.left_out)
    x = {"N": part.numbers("dense_parameter_count"), "experts": part.numbers("num_experts")}
    runs = np.array([row["hyper_id"] for row in part.rows])
    return Sweep(x, part.numbers("loss_validation"), runs, part.left_out, runs)


def _is_one(text: str, value: float) -> bool:
    try:
        return float(text) == value
    except ValueError:
        return False


_XMOD = ("N_act", "L", "K", "A", "C", "loss")
_SAME_RUN = ("run", "N_act", "L", "K", "A", "C", "seed")


def read_xmod(path: str | Path) -> Sweep:
    """An X-MoD sweep.

    Columns: N_act (parameters), L (tokens), K, A, C (training FLOPs), loss (nats per token), and N (parameters) or
    `ratio` (N/N_act). Rows with K = 1 are dense: points of the validation curves from which the dense loss at each
    sparse run's C is read, by N_act and L; their A and N do not matter. A column `dense_loss` makes curves needless.
    Optional: tokens (seen at C), dense_tokens (that the dense reference has seen at C, else taken from the dense rows'
    tokens), run (its name), group (what shares its errors and is drawn together by the bootstrap; without it all rows
    of a configuration, whatever their seed and C), seed, status (failed runs are left out).
    """
    table = read_table(path, _XMOD)
    columns = set(table.rows[0]) if table.rows else set()
    if not columns & {"N", "ratio"}:
        raise UserError(f"{path} has neither a column N (parameters) nor ratio (N/N_act); one is needed.")
    table.drop_failed()
    table.require_positive(("N_act", "L", "K", "C", "loss"))
    table.drop_duplicates([name for name in _SAME_RUN if name in columns])
    dense, table = _split(table)
    tokens = [np.nan if _wrong_number(row.get("tokens")) else float(row["tokens"]) for row in dense.rows]
    curves = DenseCurves(*(dense.numbers(name) for name in ("N_act", "L", "C", "loss")),
                         [row.get("run", "") for row in dense.rows], np.array(tokens))
    table.require_positive(("A", "ratio" if "ratio" in columns else "N"))
    _add_references(table, curves)
    _add_dense_tokens(table, curves)
    if not table.rows:
        raise UserError(f"{path} has no sparse run that can be used: " + "; ".join(table.left_out[:5]))
    return _sweep(table)


def _split(table: Table) -> tuple[Table, Table]:
    """The dense rows and the sparse ones, which keep the list of what was left out."""
    parts = []
    for is_dense in (True, False):
        mine = [i for i, row in enumerate(table.rows) if (float(row["K"]) == 1) == is_dense]
        parts.append(Table(table.path, [table.rows[i] for i in mine], [table.lines[i] for i in mine], table.left_out))
    return parts[0], parts[1]


def _add_dense_tokens(table: Table, curves: DenseCurves) -> None:
    """Fills dense_tokens where it is empty."""
    for row in table.rows:
        tokens = curves.tokens_at(float(row["N_act"]), float(row["L"]), float(row["C"]))
        if tokens is not None and not (row.get("dense_tokens") or "").strip():
            row["dense_tokens"] = repr(tokens)


def _add_references(table: Table, curves: DenseCurves) -> None:
    """Fills the column dense_loss where it is empty, and leaves out rows without a dense reference."""
    reasons = {}
    for i, row in enumerate(table.rows):
        if (row.get("dense_loss") or "").strip():
            continue
        try:
            row["dense_loss"] = repr(curves.at(float(row["N_act"]), float(row["L"]), float(row["C"])))
        except UserError as error:
            reasons[i] = str(error)
    table.drop(reasons)
    if table.rows:
        table.require_positive(("dense_loss",))


def _wrong_number(text: str | None) -> bool:
    try:
        return not 0 < float(text or "nan") < float("inf")
    except ValueError:
        return True


def _sweep(table: Table) -> Sweep:
    x = {name: table.numbers(name) for name in ("N_act", "L", "K", "A", "C", "dense_loss")}
    x["ratio"] = table.numbers("ratio") if "ratio" in table.rows[0] else table.numbers("N") / x["N_act"]
    for theirs, name in (("tokens", "D_sparse"), ("dense_tokens", "D_dense")):
        if not any(_wrong_number(row.get(theirs)) for row in table.rows):
            x[name] = table.numbers(theirs)
    names = [row.get("run") or f"line {line}" for row, line in zip(table.rows, table.lines, strict=True)]
    clusters = [(row.get("group") or "").strip() or _configuration(row) for row in table.rows]
    return Sweep(x, table.numbers("loss"), np.array(clusters), table.left_out, np.array(names))


def _configuration(row: dict[str, str]) -> str:
    """What the seeds, and the points along a run, have in common."""
    return ", ".join(f"{name} = {float(row[name]):.6g}" for name in ("N_act", "L", "K", "A", "ratio", "N")
                     if not _wrong_number(row.get(name)))
