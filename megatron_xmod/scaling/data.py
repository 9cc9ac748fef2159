"""What is read from the three kinds of tables that can be fitted: Chinchilla's runs, routed language models, and X-MoD
sweeps with their dense references at matched training FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.separable import Runs
from megatron_xmod.scaling.table import Table, is_positive, read_table


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
    table = table.pick(wanted)
    table.require_positive(("num_experts", "dense_parameter_count"))
    table.require_at_least(0, ("step",))
    table.drop_duplicates(("hyper_id", "step"))
    table = table.pick(_rows_at(table, step))
    table.require_positive(("loss_validation",))
    routers = sorted({row["router_type"] for row in table.rows} - {"Dense"})
    if not routers:
        raise UserError(f"{path} has no routed runs with k = 1 and routing_frequency 0.5.")
    return {router: _one_router(table, router) for router in routers}


def _rows_at(table: Table, step: int | None) -> list[int]:
    """One row per run: the one at the step, or the last."""
    chosen: dict[str, int] = {}
    for i, row in enumerate(table.rows):
        now, run = float(row["step"]), row["hyper_id"]
        best = chosen.get(run)
        if (now == step) if step is not None else (best is None or now > float(table.rows[best]["step"])):
            chosen[run] = i
    return sorted(chosen.values())


def _one_router(table: Table, router: str) -> Sweep:
    part = table.pick([i for i, row in enumerate(table.rows) if row["router_type"] in (router, "Dense")])
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
# The dense twin's N_act may be counted a little differently; backbones differ by far more.
_SAME_SIZE = 0.01


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
    table.require_positive(("N_act", "L", "C", "loss"))
    table.require_at_least(1, ("K",))
    table.drop_duplicates([name for name in _SAME_RUN if name in columns])
    is_dense = table.numbers("K") == 1
    dense, table = table.pick(np.flatnonzero(is_dense)), table.pick(np.flatnonzero(~is_dense))
    tokens = [float(row["tokens"]) if is_positive(row.get("tokens")) else np.nan for row in dense.rows]
    curves = DenseCurves(*(dense.numbers(name) for name in ("N_act", "L", "C", "loss")),
                         [row.get("run", "") for row in dense.rows], np.array(tokens))
    table.require_positive(("A", "ratio" if "ratio" in columns else "N"))
    _add_references(table, curves)
    _add_dense_tokens(table, curves)
    if not table.rows:
        raise UserError(f"{path} has no sparse run that can be used: " + "; ".join(table.left_out[:5]))
    return _sweep(table)


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


def _sweep(table: Table) -> Sweep:
    x = {name: table.numbers(name) for name in ("N_act", "L", "K", "A", "C", "dense_loss")}
    x["ratio"] = table.numbers("ratio") if "ratio" in table.rows[0] else table.numbers("N") / x["N_act"]
    for theirs, name in (("tokens", "D_sparse"), ("dense_tokens", "D_dense")):
        if all(is_positive(row.get(theirs)) for row in table.rows):
            x[name] = table.numbers(theirs)
    names = [row.get("run") or f"line {line}" for row, line in zip(table.rows, table.lines, strict=True)]
    clusters = [(row.get("group") or "").strip() or _configuration(row) for row in table.rows]
    return Sweep(x, table.numbers("loss"), np.array(clusters), table.left_out, np.array(names))


def _configuration(row: dict[str, str]) -> str:
    """What the seeds, and the points along a run, have in common."""
    return ", ".join(f"{name} = {float(row[name]):.6g}" for name in ("N_act", "L", "K", "A", "ratio", "N")
                     if is_positive(row.get(name)))


class DenseCurves:
    """Validation curves of dense runs.

    Args:
        N_act, L, C, loss: Size, context, training FLOPs and validation loss of each point [m].
        run: Which run each point belongs to [m]; runs with the same size and context are averaged.
        tokens: Seen at each point [m], nan where that is not known.
    """

    def __init__(self, N_act: np.ndarray, L: np.ndarray, C: np.ndarray, loss: np.ndarray, run: Sequence[str],
                 tokens: np.ndarray | None = None):
        points = defaultdict(list)
        tokens = np.full(len(C), np.nan) if tokens is None else tokens
        for key in zip(N_act, L, run, C, loss, tokens, strict=True):
            points[key[:3]].append(key[3:])
        self._curves = {key: np.array(sorted(value)).T for key, value in points.items()}

    def at(self, N_act: float, L: float, C: float) -> float:
        """The dense loss at C: monotone cubic interpolation of ln loss over ln C, averaged over runs.

        Raises:
            UserError: no curve of that size and context, or none that reaches C; a curve is never prolonged.
        """
        fitting = self._fitting(N_act, L)
        if not fitting:
            raise UserError(f"there is no dense run (K = 1) with N_act = {N_act:.4g} and L = {L:g} to compare with")
        values = [interpolate(flops, loss, C) for flops, loss, _ in fitting if flops[0] <= C <= flops[-1]]
        if not values:
            low, high = min(c[0][0] for c in fitting), max(c[0][-1] for c in fitting)
            raise UserError(f"its C = {C:.4g} lies outside the dense curve with N_act = {N_act:.4g} and L = {L:g}, "
                            f"which goes from {low:.4g} to {high:.4g} FLOPs")
        return float(np.mean(values))

    def tokens_at(self, N_act: float, L: float, C: float) -> float | None:
        """Tokens that the dense model has seen at C, in proportion to its FLOPs; None where no run tells."""
        rates = [tokens / flops for flops, _, tokens in self._fitting(N_act, L)]
        known = [float(np.nanmean(rate)) for rate in rates if not np.isnan(rate).all()]
        return C * float(np.mean(known)) if known else None

    def _fitting(self, N_act: float, L: float) -> list[np.ndarray]:
        return [curve for (size, length, _), curve in self._curves.items()
                if length == L and abs(size / N_act - 1) < _SAME_SIZE]


def interpolate(flops: np.ndarray, loss: np.ndarray, C: float) -> float:
    """Loss at C inside a curve [n]: monotone cubic interpolation of ln loss over ln C."""
    flops, first = np.unique(flops, return_index=True)
    if len(flops) == 1:
        return float(loss[first[0]])
    return float(np.exp(PchipInterpolator(np.log(flops), np.log(loss[first]))(np.log(C))))
