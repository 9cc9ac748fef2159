"""What fit_law.py does for the laws of dense and of routed models: read, fit, judge, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_xmod.scaling import plots
from megatron_xmod.scaling.bootstrap import bootstrap, intervals
from megatron_xmod.scaling.data import Sweep, read_chinchilla, read_routed
from megatron_xmod.scaling.fit import Fit, Problem, fit
from megatron_xmod.scaling.judge import fit_scores
from megatron_xmod.scaling.others import CHINCHILLA, CLARK, KAPLAN, Kaplan
from megatron_xmod.scaling.report import Report
from megatron_xmod.scaling.separable import Params

LEVEL = 0.95


@dataclass(frozen=True)
class Options:
    """loss: mse, huber or l1. bootstraps: number of refits, 0 for none. seed: of starts and draws."""

    loss: str
    bootstraps: int = 1000
    seed: int = 0


def chinchilla(path: Path, options: Options, drop_highest: int) -> tuple[dict[str, Any], Report]:
    """Fits E + A/N^alpha + B/D^beta to log losses. Returns what is saved, and the report."""
    sweep = read_chinchilla(path, drop_highest)
    zero = np.zeros(len(sweep.loss))
    best = fit(Problem(CHINCHILLA, sweep.x, sweep.loss, zero, log=True, loss=options.loss), seed=options.seed)
    report = Report("Chinchilla's law of dense models")
    report.text(f"loss = E + A/N^alpha + B/D^beta, {len(sweep.loss)} runs, {options.loss} on the log of the loss.")
    saved = _parameters(report, best, sweep.clusters, options)
    saved |= {"loss": options.loss, "scores": _scores(report, {"Chinchilla": best})}
    rival = fit(Problem(KAPLAN, sweep.x, sweep.loss, zero, log=True, loss=options.loss), seed=options.seed)
    constants = Kaplan.constants(rival.params)
    report.heading("Kaplan's form on the same runs")
    report.text("loss = [(Nc/N)^(alpha_N/alpha_D) + Dc/D]^alpha_D; it has no irreducible loss.")
    report.table(list(constants), [list(constants.values())])
    saved["kaplan"] = constants | {"scores": _scores(report, {"Kaplan": rival})}
    report.heading("Fit")
    _fit_pictures(report, best, {"N": sweep.x["N"], "D": sweep.x["D"]}, "loss (nats)")
    report.heading("Data")
    report.left_out(sweep.left_out)
    return saved | {"left_out": sweep.left_out}, report


def routed(path: Path, options: Options, step: int | None = None) -> tuple[dict[str, Any], Report]:
    """Fits Clark's law to log10 of the loss, router by router. Returns what is saved, and the report."""
    report = Report("Clark's law of routed models")
    report.text("log10 loss = a log10 N + b log10 E' + c log10 N log10 E' + d; E' saturates from E_start to E_max. "
                f"k = 1, routing frequency 0.5, dense runs as 1 expert, {options.loss} on log10 of the loss.",
                "E_start and E_max are hardly identified: compare predictions.")
    saved: dict[str, Any] = {}
    left_out: list[str] = []
    for router, sweep in read_routed(path, step).items():
        saved[router] = _one_router(report, router, sweep, options)
        left_out += [row for row in sweep.left_out if row not in left_out]
    report.heading("Data")
    report.left_out(left_out)
    return saved, report


def _one_router(report: Report, router: str, sweep: Sweep, options: Options) -> dict[str, Any]:
    y = np.log10(sweep.loss)
    best = fit(Problem(CLARK, sweep.x, y, np.zeros(len(y)), loss=options.loss), seed=options.seed)
    report.heading(f"{router}: {len(y)} runs")
    saved = _parameters(report, best, sweep.clusters, options, router.lower())
    saved |= {"loss": options.loss, "scores": _scores(report, {router: best})}
    _fit_pictures(report, best, {"N": sweep.x["N"], "experts": sweep.x["experts"]}, "log10 loss", router.lower())
    return saved | {"rmse": saved["scores"]["rmse"], "left_out": sweep.left_out}


def _parameters(report: Report, best: Fit, clusters, options: Options, name: str = "parameters") -> dict[str, Any]:
    """Parameters with bootstrap intervals, as a table and a picture."""
    if not options.bootstraps:
        report.table(("parameter", "value"), list(best.params.items()))
        return dict(best.params)
    draws = bootstrap(best, clusters, options.bootstraps, options.seed)
    return parameter_table(report, best.params, draws, name)


def parameter_table(report: Report, params: Params, draws: list[Params], name: str) -> dict[str, Any]:
    """The parameters with their bootstrap intervals, reported and as they are saved."""
    ends = intervals(draws, LEVEL)
    report.table(("parameter", "value", f"{LEVEL:.0%} from", "to"), [(n, v, *ends[n]) for n, v in params.items()])
    report.picture(f"{name}-bootstrap", f"{len(draws)} bootstrap refits: estimate (line), {LEVEL:.0%} interval (grey)",
                   plots.parameter_intervals(params, ends, {n: np.array([d[n] for d in draws]) for n in params}))
    return dict(params) | {"intervals": {n: list(end) for n, end in ends.items()}, "level": LEVEL,
                           "bootstraps": len(draws)}


def _scores(report: Report, fits: dict[str, Fit]) -> dict[str, float]:
    """Reports the scores of each fit on its own runs; returns those of the first."""
    rows = {name: fit_scores(best) for name, best in fits.items()}
    report.table(("fit", "runs", "RMSE", "MAE", "R2"),
                 [(name, s["runs"], s["rmse"], s["mae"], s["r2"]) for name, s in rows.items()])
    return next(iter(rows.values()))


def _fit_pictures(report: Report, best: Fit, values: dict[str, np.ndarray], quantity: str, name: str = "fit") -> None:
    predicted = best.problem.predict(best.params)
    report.picture(f"{name}-predicted", f"Predicted and measured {quantity}",
                   plots.predicted_and_measured([("all runs fitted", best.problem.y, predicted)], quantity))
    report.picture(f"{name}-residuals", f"Residuals, {quantity}",
                   plots.residuals(values, predicted - best.problem.y, quantity))
