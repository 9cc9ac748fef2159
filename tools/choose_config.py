"""Which K and A for a budget: what can be built, ranked by a scaling law, and how far to trust it. Needs no torch."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_xmod import flops
from megatron_xmod.config.load import load_config
from megatron_xmod.config.schema import ModelConfig
from megatron_xmod.parallel.cut import cut_stages, imbalance
from megatron_xmod.runtime.entry import run
from megatron_xmod.scaling import require_extra
from megatron_xmod.scaling.buildable import Question, nearest_backbone

# A backbone whose active parameters differ by less from the ones asked about passes for that size.
_SAME_SIZE = 0.05


def _amount(text: str, **units: float) -> float:
    """556e6 or 556M."""
    unit = (units or {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}).get(text[-1:].upper())
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number.") from error
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a finite number above 0.")
    return value


def _count(text: str) -> int:
    """32768 or 32k: lengths are counted in units of 1024."""
    value = _amount(text, K=1024)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a whole number.")
    return int(value)


def _png(text: str) -> Path:
    if Path(text).suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"it is {text}; pictures are PNG, so its name must end in .png.")
    return Path(text)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="choose_config.py", description=__doc__)
    add = parser.add_argument
    add("--compute", type=_amount, required=True, metavar="C", help="training FLOPs, as 1e20")
    add("--seq-length", type=_count, required=True, metavar="L", help="tokens per sequence, as 32k (of 1024)")
    add("--active-params", type=_amount, required=True, metavar="N", help="N_act: parameters an average token passes, "
        "as 556M; the paper's own labels where they apply")
    add("--max-params", type=_amount, metavar="M", help="most parameters of the whole model")
    add("--max-layers", type=_count, metavar="n", help="most layers of the whole model")
    add("--anchor-stride", type=_amount, metavar="A", help="use this A instead of searching")
    add("--ratio", choices=("params", "layers"), default="params", help="whether N/N_act counts parameters, embeddings "
        "included, or layers (default: params)")
    add("--pipeline-stages", type=_count, default=1, metavar="P", help="the model must be cut into P stages")
    add("--config", action="append", default=[], metavar="FILE", help="backbone: a configuration file, repeatable. "
        "Without it the paper's backbone nearest in size")
    add("--law", metavar="FILE", help="a law saved by fit_law.py xmod --json; without it the published one")
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", metavar="PNG", type=_png, help="write the map of delta over K and A, and the curve over K")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    require_extra()
    from megatron_xmod.scaling import design, fitted

    model, notes = _backbone(args)
    question = Question(args.compute, args.seq_length, args.active_params, model, args.max_params, args.max_layers,
                        args.anchor_stride, args.ratio, args.pipeline_stages)
    law = fitted.read_law(args.law) if args.law else fitted.published_law()
    choice = design.choose(question, law)
    answer = describe(question, law, choice, notes)
    if args.plot:
        draw(question, law, choice, args.plot)
    print(json.dumps(answer, indent=2) if args.json else report(answer))


def _backbone(args: argparse.Namespace) -> tuple[ModelConfig, list[str]]:
    if args.config:
        model = load_config([word for file in args.config for word in ("--config", file)]).model
        counted = flops.active_params(model)
        if abs(counted / args.active_params - 1) <= _SAME_SIZE:
            return model, []
        return model, [f"The backbone of --config has {counted:.3g} active parameters, but the law was asked about "
                       f"--active-params {args.active_params:.3g}: layers, FLOPs and N/N_act are the backbone's."]
    label, model = nearest_backbone(args.active_params)
    if abs(args.active_params / label - 1) <= _SAME_SIZE:
        return model, []
    return model, [f"Layers, FLOPs and memory are those of the paper's {label:.3g} backbone, the nearest in size to "
                   f"{args.active_params:.3g}; give your own with --config."]


def describe(question, law, choice, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The answer as plain values. Losses in nats per token, memory in bytes."""
    best = choice.best
    answer: dict[str, Any] = {
        "question": {name: value for name, value in asdict(question).items() if name != "model"},
        "law": law.source,
        "K": best.K if best else None,
        "A": best.A if best else None,
        "delta": best.delta if best else 0.0,
        "delta_interval": best.interval if best else (0.0, 0.0),
        "p_best": best.p_best if best else choice.p_dense,
        "p_dense": choice.p_dense,
        "continuous_K": choice.continuous[0] if choice.continuous else None,
        "continuous_delta": choice.continuous[1] if choice.continuous else None,
        "continuous_A": choice.stride,
        "inside_data": choice.inside,
        "law_rmse": law.rmse,
        "intervals_from": law.draws_from,
        **(_costs(question, best) if best else {}),
        "near_ties": [asdict(c) for c in choice.near_ties],
        "candidates": [asdict(c) for c in choice.candidates],
        "notes": [*choice.notes, *notes],
    }
    if law.source.startswith("arXiv"):
        from megatron_xmod.scaling.fitted import table9_misfit
        answer["table9_misfit"] = [row._asdict() for row in table9_misfit()]
    return answer


def _costs(question, candidate) -> dict[str, Any]:
    """FLOPs, tokens and memory of a candidate. Tokens: C over the true training FLOPs per token."""
    from megatron_xmod.scaling.design import training_config

    config = training_config(question, candidate)
    train = flops.train_flops_per_token(config.model, question.seq_length)
    costs = flops.layer_flops(config.model, question.seq_length)
    return {
        "layers": candidate.layers,
        "total_params": candidate.total_params,
        "flops_per_token_paper": flops.flops_per_token_paper(config.model, question.seq_length),
        "flops_ratio_to_dense": candidate.flops_ratio,
        "train_flops_per_token": train,
        "tokens": question.compute / train,
        "state_bytes": flops.state_bytes(config),
        "stage_imbalance": imbalance(costs, cut_stages(costs, question.stages)),
    }


def report(answer: dict[str, Any]) -> str:
    """The answer for people."""
    lines = [f"law: {answer['law']}", ""]
    lines += _headline(answer) + ["", _HEADER]
    lines += [_line(row, mark) for row, mark in _shown(answer)]
    lines.append(f"{len(answer['candidates'])} can be built. Delta: predicted loss against dense, nats, 80 % interval; "
                 "P(best): share of the law's refits; both take the law's form for right.")
    lines += [f"Near-ties: within the scatter of single runs about the law, {answer['law_rmse']:.4f}.", ""]
    lines += [f"! {note}" for note in answer["notes"]]
    if "table9_misfit" in answer:
        rows = ", ".join(f"K {r['K']}: {r['measured']:+.3f} (law {r['predicted']:+.3f}, "
                         f"{r['predicted'] / r['measured']:.1f}x)" for r in answer["table9_misfit"])
        lines.append("! Outside its sweeps the law has promised too much. Table 9 (165M width, 52 active layers, A 1), "
                     f"measured: {rows}.")
    return "\n".join(lines)


def _shown(answer: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The rows to print, each with its mark: the best 12 of those judged, the best and its near-ties always, and some
    that promise more outside the tested range."""
    names = {(row["K"], row["A"]): "near-tie" for row in answer["near_ties"]} | {(answer["K"], answer["A"]): "best"}
    first = answer["candidates"][0]
    judged, beyond = [], []
    for row in answer["candidates"]:
        mark = [names.get((row["K"], row["A"]), "")]
        mark += [f"{name} not tested" for name in ("K", "A") if not row[f"{name}_tested"]]
        mark += [f"A built: {row['law_A']:.3g}"] if row["law_A"] != row["A"] else []
        line = row, ", ".join(filter(None, mark))
        if all(row[key] == first[key] for key in ("K_tested", "A_tested")):
            if len(judged) < 12 or mark[0]:
                judged.append(line)
        elif row["delta"] < answer["delta"]:
            beyond.append(line)
    return judged + beyond[:6]


_HEADER = f"{'K':>4} {'A':>5} {'delta':>8}  {'interval':>18} {'P(best)':>8} {'N/N_act':>8} {'layers':>7} {'N':>9} " \
          f"{'phi/dense':>10}"


def _size(params: int) -> str:
    return f"{params / 1e9:.2f}B" if params >= 999.5e6 else f"{params / 1e6:.3g}M"


def _line(row: dict[str, Any], mark: str) -> str:
    low, high = row["interval"]
    return (f"{row['K']:>4} {row['A']:>5g} {row['delta']:>+8.4f}  [{low:+.4f}, {high:+.4f}] {row['p_best']:>8.2f} "
            f"{row['ratio']:>8.2f} {row['layers']:>7} {_size(row['total_params']):>9} {row['flops_ratio']:>10.2f}  "
            f"{mark}").rstrip()


def _headline(answer: dict[str, Any]) -> list[str]:
    optimum = "none" if answer["continuous_K"] is None else \
        f"K = {answer['continuous_K']:.1f}, delta {answer['continuous_delta']:+.4f}"
    continuous = f"optimum over real K at A = {answer['continuous_A']:g}: {optimum}"
    warning = "" if answer["inside_data"] else " (outside the law's data, see below)"
    if answer["K"] is None:
        return [f"best: dense (P {answer['p_dense']:.2f}){warning}", continuous]
    low, high = answer["delta_interval"]
    memory = sum(answer["state_bytes"].values()) / 2**30
    return [f"best: K = {answer['K']}, A = {answer['A']:g}: delta {answer['delta']:+.4f} [{low:+.4f}, {high:+.4f}] "
            f"nats against dense, P(best) {answer['p_best']:.2f}{warning}", continuous,
            f"{answer['layers']} layers, {_size(answer['total_params'])} parameters, training state "
            f"{memory:.1f} GiB before sharding",
            f"FLOPs per token: phi {answer['flops_per_token_paper']:.3g} ({answer['flops_ratio_to_dense']:.2f} of "
            f"dense), training {answer['train_flops_per_token']:.3g}; "
            f"C = {answer['question']['compute']:.3g} is {answer['tokens']:.3g} tokens"]


def draw(question, law, choice, path: Path) -> None:
    """Writes the plot."""
    from megatron_xmod.plotting import save
    from megatron_xmod.scaling import design, plots

    best = (choice.best.K, choice.best.A) if choice.best else None
    found = {(c.K, c.A): (c.delta, not design.outside_data(question, law, c)) for c in choice.candidates}
    K, every = sorted({k for k, _ in found}), sorted({a for _, a in found})
    # Few enough A to read their rows.
    A = [a for a in every if a in (0.5, round(a)) or (best and a == best[1])] if len(every) > 12 else every
    delta, inside = np.moveaxis([[found.get((k, a), (np.nan, False)) for k in K] for a in A], -1, 0)
    at = np.geomspace(1, 1.5 * max(K), 120)
    built = [(c.K, c.delta) for c in choice.candidates if c.law_A == choice.stride]
    curve = (at, *design.curve(question, law, at, choice.stride))
    tested = (law.domain if choice.stride == 1 else law.stride_domain).get("K")
    # The colours are for tested K and A; far outside the law may say anything.
    first = [c.delta for c in choice.candidates if c.untested == choice.candidates[0].untested]
    save(plots.choice(K, A, delta, inside == 1, best, curve, choice.stride, tested, tuple(np.array(built).T),
                      max(map(abs, first))), path)


if __name__ == "__main__":
    run(main)
