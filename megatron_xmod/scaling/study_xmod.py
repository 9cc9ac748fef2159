"""What fit_law.py does for an X-MoD sweep: read, fit jointly and in two stages, judge, compare, report."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_xmod.errors import UserError
from megatron_xmod.scaling import plots
from megatron_xmod.scaling.bootstrap import bootstrap
from megatron_xmod.scaling.checks import matches, require_budgets, require_fixed, require_spread
from megatron_xmod.scaling.data import Sweep, read_xmod
from megatron_xmod.scaling.fit import Fit, Problem, fit
from megatron_xmod.scaling.fitted import data_domain
from megatron_xmod.scaling.judge import (
    HELD_OUT_BY,
    Fitter,
    HeldOut,
    fit_scores,
    held,
    joint,
    leave_groups_out,
    pooled_scores,
    regrets,
    scores,
    staged,
)
from megatron_xmod.scaling.law import BASE, CANDIDATE, GAIN_BY_COMPUTE, RIVALS, XMOD
from megatron_xmod.scaling.profile import Interval, profile_curve, profile_interval
from megatron_xmod.scaling.report import Report
from megatron_xmod.scaling.separable import Form
from megatron_xmod.scaling.stages import two_stage
from megatron_xmod.scaling.studies import LEVEL, Options, parameter_table

FORMS: dict[str, Form] = {form.name: form for form in (XMOD, BASE, *RIVALS)}


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
    problem = _problem(sweep, form, options.loss, log)
    require_spread(problem, fixed)
    best = fit(problem, seed=options.seed, fixed=fixed, extra=_nested_start(problem, fixed, options.seed))
    report = Report("The scaling law of X-MoD")
    report.text(f"Law {form.name}, {len(problem.y)} sparse runs, {options.loss} on the {'log of the ' if log else ''}"
                "loss. Delta is the loss against the dense reference at the same training FLOPs, in nats per token.")
    saved: dict[str, Any] = {"law": form.name, "loss": options.loss, "log": log, "fixed": fixed}
    draws = bootstrap(best, sweep.clusters, options.bootstraps, options.seed) if options.bootstraps else []
    if draws:
        saved |= parameter_table(report, best.params, draws, "parameters")
    else:
        saved |= best.params
        report.table(("parameter", "value"), list(best.params.items()))
    _at_bounds(report, best)
    saved["profiles"] = _profiles(report, best)
    saved["scores"] = fit_scores(best)
    _in_sample(report, best, saved["scores"])
    saved["held_out"] = _held_out(report, best, options.seed)
    saved["regret"] = _regret(report, best, options.seed)
    if kept_out.any():
        saved["outside"] = _outside(report, best, everything.select(kept_out))
    saved["rivals"] = _rivals(report, best, sweep, options)
    report.heading("Data")
    report.left_out(sweep.left_out)
    return saved | data_domain(sweep.x) | {"draws": draws, "left_out": sweep.left_out}, report


def _problem(sweep: Sweep, form: Form, loss: str, log: bool) -> Problem:
    missing = [name for name in form.variables if name not in sweep.x]
    if missing:
        columns = {"D_dense": "dense_tokens", "D_sparse": "tokens"}
        raise UserError(f"the law {form.name} needs the columns {', '.join(columns.get(m, m) for m in missing)}, "
                        "filled in every row.")
    return Problem(form, sweep.x, sweep.loss, sweep.x["dense_loss"], log, loss)


def _without_strides(sweep: Sweep) -> Sweep:
    """The runs with A = 1, which the law without A can describe; the others are named as left out."""
    kept = sweep.x["A"] == 1
    others = sweep.select(~kept)
    named = [f"{run}: A is {a:g}, and the law base is for A = 1" for run, a in
             zip(others.names, others.x["A"], strict=True)]
    return replace(sweep.select(kept), left_out=sweep.left_out + named)


def _profiles(report: Report, best: Fit) -> dict[str, Any]:
    """Which exponents the data pin down."""
    report.heading("What the data pin down")
    problem = best.problem
    if problem.loss != "mse":
        best = fit(Problem(problem.form, problem.x, problem.y, problem.base, problem.log), fixed=best.fixed,
                   extra=(best.params,))
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


def _in_sample(report: Report, best: Fit, result: dict[str, float]) -> None:
    problem = best.problem
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


def _held_out(report: Report, best: Fit, seed: int) -> dict[str, Any]:
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


def _regret(report: Report, best: Fit, seed: int) -> dict[str, float]:
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
        report.text("No N_act, L and A has several K to choose from.")
        return {}
    report.table(("N_act", "L", "A", "chosen K", "best K", "regret (nats)"), [list(row.values()) for row in rows])
    regret = [row["regret"] for row in rows]
    report.text(f"Mean {np.mean(regret):.5f}, largest {np.max(regret):.5f} nats.")
    return {"mean": float(np.mean(regret)), "largest": float(np.max(regret)), "held_out": bool(results)}


def _outside(report: Report, best: Fit, sweep: Sweep) -> dict[str, float]:
    problem = _problem(sweep, best.problem.form, best.problem.loss, best.problem.log)
    predicted = problem.predict(best.params)
    result = scores(problem.y, predicted, problem.base)
    report.heading("Runs kept out of the fit")
    report.table(("runs", "RMSE", "MAE"), [(result["runs"], result["rmse"], result["mae"])])
    report.picture("outside", "Runs kept out of the fit, predicted; the band is +-0.02",
                   plots.predicted_and_measured([("kept out", problem.y, predicted)], "loss (nats)", 0.02))
    return result


def _rivals(report: Report, best: Fit, sweep: Sweep, options: Options) -> dict[str, Any]:
    """Other laws on the same runs, and the published way of fitting."""
    problem = best.problem
    results: dict[str, dict[str, float]] = {problem.form.name: fit_scores(best)}
    notes = []
    for form in (XMOD, *RIVALS):
        if form is problem.form or form is XMOD and problem.form is BASE:
            continue
        try:
            rival = _problem(sweep, form, options.loss, problem.log)
            fixed = held(form, best.fixed)
            require_budgets(rival, fixed)
            known = best if problem.form is XMOD else None
            results[form.name] = fit_scores(fit(rival, 16, options.seed,
                                                _nested_start(rival, fixed, options.seed, known), fixed))
        except UserError as error:
            notes.append(f"- {form.name}: {error}")
    if _has_two_stages(best) and np.any(problem.x["A"] != 1):
        try:
            stages = two_stage(problem, options.seed)
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


# Parameters with which a wider law is the reduced one.
_REDUCED = {CANDIDATE: {"v": 0.0, "eta_D": 0.3, "rho_D": 0.5}, GAIN_BY_COMPUTE: {"kappa": 0.0}}


def _nested_start(problem: Problem, fixed: dict[str, float], seed: int, known: Fit | None = None
                  ) -> tuple[dict[str, float], ...]:
    """The reduced law inside a wider one, so that the wider one never fits worse. `known`: its fit, if there is one."""
    if problem.form not in _REDUCED:
        return ()
    if known is None:
        reduced = Problem(XMOD, problem.x, problem.y, problem.base, problem.log, problem.loss)
        known = fit(reduced, seed=seed, fixed=held(XMOD, fixed))
    return (known.params | _REDUCED[problem.form],)


def _at_bounds(report: Report, best: Fit) -> None:
    ends = [f"{e.name} = {best.params[e.name]:g}" for e in best.problem.form.exponents if e.name not in best.fixed
            and min(best.params[e.name] - e.low, e.high - best.params[e.name]) < 1e-6]
    if ends:
        report.text(f"At the end of the search: {', '.join(ends)}. The data ask for more than the law can give, or "
                    "do not tell.")
