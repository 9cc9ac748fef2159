"""The report of a sweep: a table and curves for every size, context and budget."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from megatron_xmod.flops import model_plan, total_params
from megatron_xmod.report import Report
from megatron_xmod.runtime.words import duration
from megatron_xmod.sweep import plots
from megatron_xmod.sweep.compare import Curve, Difference, Pairs, dense_curves, difference, groups
from megatron_xmod.sweep.identity import is_dense
from megatron_xmod.sweep.plan import Plan
from megatron_xmod.sweep.state import DONE

_HEADER = ("variant", "seeds", "layers", "N", "tokens", "C", "causal", "top-k", "gap", "vs dense, equal tokens",
           "vs dense, equal FLOPs", "time")
_LEGEND = ("Losses are validation losses in nats per token, means over seeds ± their standard deviation; "
           "`causal` is what a model can do, `top-k` sees later tokens; gap = causal − top-k. N counts the parameters "
           "of matrices, C training FLOPs (forward and backward, causal attention, head). Differences are of the "
           "causal loss, ± standard error over the seeds of both, at the shorter end of the two: the longer curve is "
           "interpolated there. Time is that of the training steps alone, per run.")
_MIDDLE = {"dense": "\\* The dense loss is read in the middle of its schedule, before its learning rate has come down: "
                    "that flatters the sparse run. Runs with a `budget` end at the same FLOPs, but for whole steps.",
           "own": "† The run's own loss is read in the middle of its schedule, which flatters dense."}


def write_report(plan: Plan, pairs: Pairs) -> Path:
    """Writes report.md and its pictures into the sweep's folder; returns the path of report.md."""
    output = Path(plan.spec.output)
    report = Report(f"Sweep {output.name}")
    done = sum(state.status == DONE for _, state in pairs)
    report.text(f"{done} of {len(pairs)} runs are done. Rows: [runs.csv](runs.csv); every validation: "
                f"[curves.csv](curves.csv). Made by `python tools/sweep.py --config {plan.spec.file}`.")
    found = groups(pairs)
    if found:
        report.text(_LEGEND)
    for number, ((N_act, length, end), variants) in enumerate(found.items()):
        budgeted = next(iter(variants.values()))[0].run.budget
        length_of_run = f"C {end:.3g} FLOPs" if budgeted else f"{end} steps"
        report.heading(f"N_act {N_act / 1e6:.4g} M, L {length}, {length_of_run}")
        _table(report, variants)
        report.picture(f"loss-{number}", "Seeds thin, their mean thick, dense dashed. The first tenth is not shown.",
                       plots.loss_curves(variants))
    _sparsities(report, found)
    _unfinished(report, plan, pairs)
    return report.write(output)


def _table(report: Report, variants: dict[str, list[Curve]]) -> None:
    dense = dense_curves(variants)
    notes: set[str] = set()
    report.table(_HEADER, [_row(name, curves, dense, notes) for name, curves in variants.items()])
    if not dense:
        report.text("No dense run of this size, context and length is done, so there is nothing to compare with.")
    elif sum(is_dense(curves[0].run.config) for curves in variants.values()) > 1:
        report.text(f"Of the dense variants the best, {dense[0].run.variant}, is compared with.")
    report.text(*(text for name, text in _MIDDLE.items() if name in notes))


def _row(name: str, curves: list[Curve], dense: list[Curve], notes: set[str]) -> list:
    first = curves[0]
    config, run = first.run.config, first.run
    seconds = [curve.seconds for curve in curves if curve.seconds]
    gaps = [curve.end("loss_causal") - curve.end("loss_topk") for curve in curves]
    against = ["", ""] if is_dense(config) else [
        _shown(difference(curves, dense, axis, "loss_causal"), notes) if dense else "" for axis in ("tokens", "flops")]
    return [name, len(curves), model_plan(config.model).layers, f"{total_params(config.model) / 1e6:.4g} M",
            f"{first.end('step') * run.tokens_per_step:.4g}", f"{first.end('flops'):.4g}",
            *(_spread([curve.end(loss) for curve in curves]) for loss in ("loss_causal", "loss_topk")),
            f"{mean(gaps):+.4f}", *against, duration(mean(seconds)) if seconds else ""]


def _spread(values: list[float]) -> str:
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def _shown(found: Difference | None, notes: set[str]) -> str:
    if found is None:
        return "curves don't meet"
    marks = ("*" if found.dense_inside else "") + ("†" if found.own_inside else "")
    notes |= ({"dense"} if found.dense_inside else set()) | ({"own"} if found.own_inside else set())
    return f"{found.mean:+.4f}" + (f" ± {found.error:.4f}" if found.error is not None else "") + marks


def _sparsities(report: Report, found: dict[tuple, dict[str, list[Curve]]]) -> None:
    """A picture over K where a line would have at least two points."""
    lines: dict[str, list[tuple[int, float, float | None]]] = defaultdict(list)
    for variants in found.values():
        dense = dense_curves(variants)
        for curves in variants.values():
            model, run = curves[0].run.config.model, curves[0].run
            gain = difference(curves, dense, "flops", "loss_causal") if dense and not is_dense(run.config) else None
            if gain:
                rest = [part for part in run.variant.split("-") if part != f"K={model.routing.K}"]
                lines["-".join(rest)].append((model.routing.K, gain.mean, gain.error))
    lines = {name: points for name, points in lines.items() if len({K for K, *_ in points}) > 1}
    if lines:
        report.heading("Over K")
        report.picture("over-K", "Below 0 the sparse model is better than dense at the same training FLOPs.",
                       plots.gain_over_sparsity(lines, "flops"))


def _unfinished(report: Report, plan: Plan, pairs: Pairs) -> None:
    rest = [f"- {run.name}: {state.status}{f', {state.error}' if state.error else ''}"
            for run, state in pairs if state.status != DONE]
    if rest:
        report.heading("Not done")
        report.text("\n".join(rest))
    if plan.left_out:
        report.heading("Combinations that can't be built")
        report.text("\n".join(f"- {reason}" for reason in plan.left_out))
