"""Fits a scaling law to a CSV table of runs, prints and saves it, and writes a report with plots. Needs no torch."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.entry import run
from megatron_xmod.runtime.files import write_atomically
from megatron_xmod.scaling import require_extra
from megatron_xmod.scaling.law import FORMS

_COLUMNS = """columns of the table:
  needed    N_act (parameters), N (parameters) or ratio (N/N_act), L (tokens), K, A, C (training FLOPs), loss (nats)
  dense     dense_loss (nats) in each row, or rows of dense runs, K = 1, from which it is read at the same C
  optional  run, seed, group (the bootstrap draws it whole), status (failed rows are left out), tokens, dense_tokens"""
_EXPONENTS_HELP = "hold an exponent of the law at a value; may be given several times"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fit_law.py", description=__doc__)
    laws = parser.add_subparsers(dest="law", required=True, metavar="{chinchilla,routed,xmod}")
    dense = _law(laws, "chinchilla", "huber", "dense runs: loss = E + A/N^alpha + B/D^beta")
    dense.add_argument("--drop-highest", type=int, default=5, metavar="N",
                       help="leave out the N highest losses (default 5, as arXiv 2404.10102)")
    routed = _law(laws, "routed", "mse", "routed language models: one law per router")
    routed.add_argument("--step", type=int, help="fit the losses at this step instead of each run's last")
    sweep = _law(laws, "xmod", "mse", "an X-MoD sweep: the loss against dense, by N_act, N, L, K and A")
    sweep.epilog, sweep.formatter_class = _COLUMNS, argparse.RawDescriptionHelpFormatter
    sweep.add_argument("--form", default="xmod", choices=FORMS,
                       help="the law: the paper's, the same without A, with the exposure term, or a rival")
    sweep.add_argument("--log", action="store_true", help="residuals of the log of the loss")
    sweep.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE", help=_EXPONENTS_HELP)
    sweep.add_argument("--hold-out", action="append", default=[], metavar="NAME=VALUE",
                       help="keep the runs with this N_act, L, K, A or C out of the fit and predict them; repeatable")
    return parser.parse_args(argv)


def _law(laws, name: str, loss: str, text: str) -> argparse.ArgumentParser:
    parser = laws.add_parser(name, help=text, description=text)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="the table, CSV or CSV in gzip")
    parser.add_argument("--loss", choices=("huber", "l1", "mse"), default=loss, help=f"default: {loss}")
    parser.add_argument("--bootstrap", type=int, default=1000, metavar="N", help="bootstrap refits (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of random starts and bootstrap draws (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the parameters and what was found")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write report.md with plots there")
    return parser


def main(argv: list[str]) -> None:
    args = parse(argv)
    require_extra()
    from megatron_xmod.scaling import studies

    for name in ("bootstrap", "seed", "drop_highest"):
        if getattr(args, name, 0) < 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be 0 or more.")
    options = studies.Options(args.loss, args.bootstrap, args.seed)
    if args.law == "chinchilla":
        saved, report = studies.chinchilla(args.data, options, args.drop_highest)
    elif args.law == "routed":
        saved, report = studies.routed(args.data, options, args.step)
    else:
        saved, report = studies.xmod(args.data, options, FORMS[args.form], args.log,
                                     dict(map(_assignment, args.fix)), list(map(_assignment, args.hold_out)))
    notes = []
    if args.json:
        write_atomically(args.json, json.dumps(_plain(saved), indent=1, allow_nan=False) + "\n")
        notes.append(f"saved: {args.json}")
    if args.report:
        notes.append(f"report: {report.write(args.report)}")
    print("\n\n".join([str(report), *notes]))


def _plain(value: Any) -> Any:
    """The same with null for what is no finite number, which JSON does not know."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _assignment(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise UserError(f"{text!r} must be NAME=VALUE with a number, as eta_N=0.078 or L=65536.") from error


if __name__ == "__main__":
    run(main)
