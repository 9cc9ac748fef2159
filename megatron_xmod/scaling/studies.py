"""What fit_law.py does for each kind of table: read, fit, judge, report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_xmod.report import Report
from megatron_xmod.scaling import sections
from megatron_xmod.scaling.checks import matches, require_fixed, require_spread, sweep_problem
from megatron_xmod.scaling.data import Sweep, read_chinchilla, read_routed, read_xmod
from megatron_xmod.scaling.fit import Fit, Problem, fit, require_runs
from megatron_xmod.scaling.fitted import data_domain
from megatron_xmod.scaling.judge import nested_start
from megatron_xmod.scaling.law import BASE, CHINCHILLA, CLARK, KAPLAN, XMOD, Kaplan
from megatron_xmod.scaling.separable import Form
from megatron_xmod.scaling.uncertainty import Bootstrap, bootstrap


@dataclass(frozen=True)
class Options:
    """loss: mse, huber or l1. bootstraps: number of refits, 0 for none. seed: of starts and draws."""

    loss: str
    bootstraps: int = 1000
    seed: int = 0

    def bootstrap(self, best: Fit, sweep: Sweep) -> Bootstrap:
        return bootstrap(best, sweep.clusters, self.bootstraps, self.seed)


def chinchilla(path: Path, options: Options, drop_highest: int) -> tuple[dict[str, Any], Report]:
    """Fits E + A/N^alpha + B/D^beta to log losses. Returns what is saved, and the report."""
    sweep = read_chinchilla(path, drop_highest)
    zero = np.zeros(len(sweep.loss))
    best = fit(Problem(CHINCHILLA, sweep.x, sweep.loss, zero, log=True, loss=options.loss), seed=options.seed)
    report = Report("Chinchilla's law of dense models")
    report.text(f"loss = E + A/N^alpha + B/D^beta, {len(sweep.loss)} runs, {options.loss} on the log of the loss.")
    saved = sections.parameters(report, best, options.bootstrap(best, sweep))
    saved |= {"loss": options.loss, "scores": sections.score_table(report, {"Chinchilla": best})}
    rival = fit(Problem(KAPLAN, sweep.x, sweep.loss, zero, log=True, loss=options.loss), seed=options.seed)
    constants = Kaplan.constants(rival.params)
    report.heading("Kaplan's form on the same runs")
    report.text("loss = [(Nc/N)^(alpha_N/alpha_D) + Dc/D]^alpha_D; it has no irreducible loss.")
    report.table(list(constants), [list(constants.values())])
    saved["kaplan"] = constants | {"scores": sections.score_table(report, {"Kaplan": rival})}
    report.heading("Fit")
    sections.fit_pictures(report, best, {"N": sweep.x["N"], "D": sweep.x["D"]}, "loss (nats)")
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
    saved = sections.parameters(report, best, options.bootstrap(best, sweep), router.lower())
    saved |= {"loss": options.loss, "scores": sections.score_table(report, {router: best})}
    sections.fit_pictures(report, best, {"N": sweep.x["N"], "experts": sweep.x["experts"]}, "log10 loss",
                          router.lower())
    return saved | {"rmse": saved["scores"]["rmse"], "left_out": sweep.left_out}


def xmod(path: Path, options: Options, form: Form = XMOD, log: bool = False, fixed: dict[str, float] | None = None,
         outside: list[tuple[str, float]] | None = None) -> tuple[dict[str, Any], Report]:
    """Fits a law to an X-MoD sweep. Returns what is saved, and the report.

    Args:
        form: The law; the others are fitted too, to compare.
        log: Residuals of the log of the loss.
        fixed: Exponents held at a value.
        outside: Values (variable, value) whose runs are kept out of the fit and predicted by it.
    """
    fixed = fixed or {}
    require_fixed(form, fixed)
    everything = read_xmod(path)
    kept_out = matches(everything, outside or [])
    sweep = everything.select(~kept_out)
    if form is BASE:
        sweep = _without_strides(sweep)
    problem = sweep_problem(sweep, form, options.loss, log)
    require_runs(problem, fixed)
    require_spread(problem, fixed)
    best = fit(problem, seed=options.seed, fixed=fixed, extra=nested_start(problem, fixed, options.seed))
    report = Report("The scaling law of X-MoD")
    report.text(f"Law {form.name}, {len(problem.y)} sparse runs, {options.loss} on the {'log of the ' if log else ''}"
                "loss. Delta is the loss against the dense reference at the same training FLOPs, in nats per token.")
    saved: dict[str, Any] = {"law": form.name, "loss": options.loss, "log": log, "fixed": fixed}
    refits = options.bootstrap(best, sweep)
    saved |= sections.parameters(report, best, refits)
    sections.at_bounds(report, best)
    saved["profiles"] = sections.profiles(report, best)
    saved["scores"] = sections.in_sample(report, best)
    saved["held_out"] = sections.held_out(report, best, options.seed)
    saved["regret"] = sections.regret(report, best, options.seed)
    if kept_out.any():
        saved["outside"] = sections.outside(report, best, everything.select(kept_out))
    saved["rivals"] = sections.rivals(report, best, sweep, options.seed)
    report.heading("Data")
    report.left_out(sweep.left_out)
    return saved | data_domain(sweep.x) | {"draws": refits.draws, "left_out": sweep.left_out}, report


def _without_strides(sweep: Sweep) -> Sweep:
    """The runs with A = 1, which the law without A can describe; the others are named as left out."""
    kept = sweep.x["A"] == 1
    others = sweep.select(~kept)
    named = [f"{run}: A is {a:g}, and the law base is for A = 1" for run, a in
             zip(others.names, others.x["A"], strict=True)]
    return replace(sweep.select(kept), left_out=sweep.left_out + named)
