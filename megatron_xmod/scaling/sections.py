"""The sections of the reports of fits: each finds something out, writes it down, and returns what is saved of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_xmod.errors import UserError
from megatron_xmod.report import Report
from megatron_xmod.scaling import plots
from megatron_xmod.scaling.checks import require_budgets, sweep_problem
from megatron_xmod.scaling.data import Sweep
from megatron_xmod.scaling.fit import Fit, Problem, fit, two_stage
from megatron_xmod.scaling.judge import (
    HELD_OUT_BY,
    Fitter,
    HeldOut,
    fit_scores,
    held,
    joint,
    leave_groups_out,
    nested_start,
    pooled_scores,
    regrets,
    scores,
    staged,
)
from megatron_xmod.scaling.law import BASE, FORMS, RIVALS, XMOD
from megatron_xmod.scaling.uncertainty import Bootstrap, Interval, profile_curve, profile_interval

LEVEL = 0.95


def parameters(report: Report, best: Fit, refits: Bootstrap, name: str = "parameters") -> dict[str, Any]:
    """The parameters, with intervals and a picture where there are bootstrap refits."""
    params, draws = best.params, refits.draws
    if not draws:
        report.table(("parameter", "value"), list(params.items()))
        return dict(params)
    ends = refits.intervals(LEVEL)
    report.table(("parameter", "value", f"{LEVEL:.0%} from", "to"), [(n, v, *ends[n]) for n, v in params.items()])
    report.picture(f"{name}-bootstrap", f"{len(draws)} bootstrap refits, {refits.clusters} groups drawn for each: "
                   f"estimate (line), {LEVEL:.0%} interval (grey)",
                   plots.parameter_intervals(params, ends, {n: np.array([d[n] for d in draws]) for n in params}))
    return dict(params) | {"intervals": {n: list(end) for n, end in ends.items()}, "level": LEVEL,
                           "bootstraps": len(draws), "clusters": refits.clusters}


def score_table(report: Report, fits: dict[str, Fit]) -> dict[str, float]:
    """Reports the scores of each fit on its own runs; returns those of the first."""
    rows = {name: fit_scores(best) for name, best in fits.items()}
    report.table(("fit", "runs", "RMSE", "MAE", "R2"),
                 [(name, s["runs"], s["rmse"], s["mae"], s["r2"]) for name, s in rows.items()])
    return next(iter(rows.values()))


def fit_pictures(report: Report, best: Fit, values: dict[str, np.ndarray], quantity: str, name: str = "fit") -> None:
    predicted = best.problem.predict(best.params)
    report.picture(f"{name}-predicted", f"Predicted and measured {quantity}",
                   plots.predicted_and_measured([("all runs fitted", best.problem.y, predicted)], quantity))
    report.picture(f"{name}-residuals", f"Residuals, {quantity}",
                   plots.residuals(values, predicted - best.problem.y, quantity))


def at_bounds(report: Report, best: Fit) -> None:
    ends = [f"{e.name} = {best.params[e.name]:g}" for e in best.problem.form.exponents if e.name not in best.fixed
            and min(best.params[e.name] - e.low, e.high - best.params[e.name]) < 1e-6]
    if ends:
        report.text(f"At the end of the search: {', '.join(ends)}. The data ask for more than the law can give, or "
                    "do not tell.")


def profiles(report: Report, best: Fit) -> dict[str, Any]:
    """Which exponents the data pin down."""
    report.heading("What the data pin down")
    problem = best.problem
    if problem.loss != "mse":
        best = fit(replace(problem, loss="mse"), fixed=best.fixed, extra=(best.params,))
    free = [e.name for e in problem.form.exponents if e.name not in best.fixed]
    if not free or best.objective <= 1e-24 * float(problem.y @ problem.y):
        report.text("No profiles: nothing is free, or the fit is exact.")
        return {}
    found: dict[str, Interval] = {name: profile_interval(best, name, LEVEL) for name in free}
    report.text(f"Profile likelihood: the {LEVEL:.0%} range of each exponent when all others are fitted again "
                "(least squares).")
    report.table(("exponent", "value", "from", "to", ""),
                 [(n, best.params[n], i.low, i.high, "identified" if i.identified else "NOT IDENTIFIED")
                  for n, i in found.items()])
    loose = [name for name, interval in found.items() if not interval.identified]
    if loose:
        report.text(f"{', '.join(loose)}: the range reaches the end of the search (0.001 stands for a logarithm), or "
                    "goes beyond half or twice the estimate. The law predicts nearly the same with quite another "
                    "value, so read nothing into it.")
    curves, limit = profile_curve(best, found, LEVEL)
    report.picture("profiles", f"Profiles of the exponents: estimate (line), {LEVEL:.0%} level (dashed)",
                   plots.profiles(curves, best.params, limit))
    return {name: {"from": i.low, "to": i.high, "identified": i.identified} for name, i in found.items()}


def in_sample(report: Report, best: Fit) -> dict[str, float]:
    problem, result = best.problem, fit_scores(best)
    predicted = problem.predict(best.params)
    report.heading("Fit")
    report.text(f"RMSE {result['rmse']:.5f}, MAE {result['mae']:.5f}, R2 of delta {result['r2']:.4f} on "
                f"{result['runs']} runs.")
    base = problem.base
    report.picture("fit-predicted", "Predicted and measured loss and delta (nats); the band is +-0.02",
                   plots.predicted_and_measured([("loss", problem.y, predicted),
                                                 ("delta", problem.y - base, predicted - base)], "(nats)", 0.02))
    report.picture("fit-residuals", "Residuals (nats)", plots.residuals(
        {name: problem.x[name] for name in ("K", "L", "N_act", "A", "C")}, predicted - problem.y, "(nats)"))
    return result


def held_out(report: Report, best: Fit, seed: int) -> dict[str, Any]:
    """Whole groups left out, the joint fit beside the published two stages."""
    report.heading("Whole groups held out")
    fitters: dict[str, Fitter] = {"joint": partial(joint, fixed=best.fixed, seed=seed)}
    if _has_two_stages(best):
        fitters["two-stage"] = partial(staged, seed=seed)
    saved: dict[str, Any] = {}
    rows, panels, reasons = [], [], []
    for variable in HELD_OUT_BY:
        results = {name: leave_groups_out(best.problem, variable, fitter) for name, fitter in fitters.items()}
        # Compared on the groups that every way of fitting can predict.
        common = set.intersection(*({r.value for r in found if not r.problem} for found in results.values()))
        saved[variable] = {name: pooled_scores(best.problem, found, common) for name, found in results.items()}
        reasons += [f"{variable} = {r.value:g}, {name}: {r.problem}"
                    for name, found in results.items() for r in found if r.problem]
        if common:
            rows += [(variable, name, s["runs"], s["rmse"], s["mae"]) for name, s in saved[variable].items()]
        if any(not r.problem for r in results["joint"]):
            panels.append(_panel(best.problem, variable, results["joint"]))
    if rows:
        report.table(("held out by", "fit", "runs predicted", "RMSE", "MAE"), rows)
    else:
        report.text("No group can be held out and predicted by every fit.")
    if reasons:
        report.text("Not predicted:", "\n".join(f"- {reason}" for reason in reasons))
    if panels:
        report.picture("held-out", "Runs predicted without their group, joint fit; the band is +-0.02",
                       plots.predicted_and_measured(panels, "loss (nats)", 0.02))
    return saved


def _has_two_stages(best: Fit) -> bool:
    """The published way of fitting knows one law, on raw losses, and holds nothing."""
    return best.problem.form is XMOD and not best.problem.log and not best.fixed


def _panel(problem: Problem, variable: str, results: list[HeldOut]) -> plots.Panel:
    good = [result for result in results if not result.problem]
    return (f"left out by {variable}", np.concatenate([problem.y[r.runs] for r in good]),
            np.concatenate([r.predicted for r in good]))


def regret(report: Report, best: Fit, seed: int) -> dict[str, float]:
    """What choosing K by the law would have cost on the tested grids, with each L held out where that can be done."""
    problem = best.problem
    predicted = problem.predict(best.params)
    where = "in-sample"
    results = [r for r in leave_groups_out(problem, "L", partial(joint, fixed=best.fixed, seed=seed)) if not r.problem]
    if results:
        predicted, where = np.full(len(problem.y), np.nan), "L held out"
        for result in results:
            predicted[result.runs] = result.predicted
    rows = regrets(problem, predicted)
    report.heading(f"Regret of the K chosen by the law ({where})")
    if not rows:
        report.text("No N_act, L, A and C has several K to choose from.")
        return {}
    report.table(("N_act", "L", "A", "C", "chosen K", "best K", "regret (nats)"), [list(row.values()) for row in rows])
    prices = [row["regret"] for row in rows]
    report.text(f"Mean {np.mean(prices):.5f}, largest {np.max(prices):.5f} nats.")
    return {"mean": float(np.mean(prices)), "largest": float(np.max(prices)), "held_out": bool(results)}


def outside(report: Report, best: Fit, sweep: Sweep) -> dict[str, float]:
    problem = sweep_problem(sweep, best.problem.form, best.problem.loss, best.problem.log)
    predicted = problem.predict(best.params)
    result = scores(problem.y, predicted, problem.base)
    report.heading("Runs kept out of the fit")
    report.table(("runs", "RMSE", "MAE"), [(result["runs"], result["rmse"], result["mae"])])
    report.picture("outside", "Runs kept out of the fit, predicted; the band is +-0.02",
                   plots.predicted_and_measured([("kept out", problem.y, predicted)], "loss (nats)", 0.02))
    return result


def rivals(report: Report, best: Fit, sweep: Sweep, seed: int) -> dict[str, Any]:
    """Other laws on the same runs, and the published way of fitting."""
    problem = best.problem
    results: dict[str, dict[str, float]] = {problem.form.name: fit_scores(best)}
    notes = []
    for form in (XMOD, *RIVALS):
        if form is problem.form or form is XMOD and problem.form is BASE:
            continue
        try:
            rival = sweep_problem(sweep, form, problem.loss, problem.log)
            fixed = held(form, best.fixed)
            require_budgets(rival, fixed)
            known = best if problem.form is XMOD else None
            results[form.name] = fit_scores(fit(rival, 16, seed, nested_start(rival, fixed, seed, known), fixed))
        except UserError as error:
            notes.append(f"- {form.name}: {error}")
    if _has_two_stages(best) and np.any(problem.x["A"] != 1):
        try:
            stages = two_stage(problem, seed)
            results["xmod, two-stage"] = scores(problem.y, problem.predict(stages.params), problem.base)
            notes.append(f"- The two stages leave a free offset of {stages.sweep_offset:+.5f} nats in the A-sweep, "
                         "which the law has no place for and these scores do without.")
        except UserError as error:
            notes.append(f"- two-stage: {error}")
    report.heading("Other laws on the same runs (in-sample)")
    report.table(("law", "parameters", "RMSE", "MAE", "R2"),
                 [(n, len(FORMS[n.split(",")[0]].names), s["rmse"], s["mae"], s["r2"]) for n, s in results.items()])
    if notes:
        report.text("\n".join(notes))
    return results
