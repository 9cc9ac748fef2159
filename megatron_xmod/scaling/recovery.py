"""Does a fit give back the law that made the runs? Run as `python -m megatron_xmod.scaling.recovery --help`."""

from __future__ import annotations

import argparse
import csv
import io
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_xmod.runtime.entry import run
from megatron_xmod.runtime.files import write_atomically
from megatron_xmod.scaling.bootstrap import bootstrap, intervals
from megatron_xmod.scaling.fit import Problem, fit
from megatron_xmod.scaling.judge import HELD_OUT_BY, joint, leave_groups_out, pooled_scores, staged
from megatron_xmod.scaling.law import PUBLISHED, XMOD
from megatron_xmod.scaling.profile import profile_interval
from megatron_xmod.scaling.synthetic import Cell, outside_grid, paper_grid, simulate, variables

NOISE = 0.00876
LEVEL = 0.8


def coverage(repetitions: int, bootstraps: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """How often the 80 % intervals of each exponent hold the truth: of the profile and, with `bootstraps` refits, of
    the bootstrap; and how often the profile calls the exponent identified at 95 %. Shares of the repetitions."""
    x = variables(paper_grid())
    counts = {e.name: dict.fromkeys(("profile", "bootstrap", "identified"), 0) for e in XMOD.exponents}
    for repetition in range(repetitions):
        best = fit(_drawn(x, seed + repetition), starts=8, extra=(PUBLISHED,))
        ends = intervals(bootstrap(best, range(len(x["L"])), bootstraps), LEVEL) if bootstraps else {}
        for name, count in counts.items():
            interval = profile_interval(best, name, LEVEL)
            count["profile"] += interval.low <= PUBLISHED[name] <= interval.high
            count["identified"] += profile_interval(best, name, 0.95).identified
            if ends:
                count["bootstrap"] += ends[name][0] <= PUBLISHED[name] <= ends[name][1]
    return {name: {kind: number / repetitions for kind, number in count.items()} for name, count in counts.items()}


def held_out(seed: int, by: Sequence[str] = HELD_OUT_BY) -> dict[str, dict[str, float]]:
    """RMSE (nats) on whole groups held out, of the joint fit and of the published two stages, on one draw."""
    problem = _drawn(variables(paper_grid()), seed)
    return {variable: {name: pooled_scores(problem, leave_groups_out(problem, variable, fitter))["rmse"]
                       for name, fitter in (("joint", joint), ("two-stage", staged))} for variable in by}


def _drawn(x, seed: int) -> Problem:
    return Problem(XMOD, x, simulate(x, PUBLISHED, NOISE, np.random.default_rng(seed)), x["dense_loss"])


def sweep_csv(cells: list[Cell], noise: float, seed: int) -> str:
    """A sweep as `fit_law.py xmod` reads it, with its dense losses."""
    x = variables(cells)
    loss = simulate(x, PUBLISHED, noise, np.random.default_rng(seed))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("run", "N_act", "ratio", "L", "K", "A", "C", "loss", "dense_loss", "tokens", "dense_tokens"))
    for i in range(len(loss)):
        values = (x[name][i] for name in ("N_act", "ratio", "L", "K", "A", "C"))
        rest = (loss[i], x["dense_loss"][i], x["D_sparse"][i], x["D_dense"][i])
        writer.writerow((f"run{i}", *map(float, values), *map(float, rest)))
    return stream.getvalue()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="recovery", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=50, help="draws for the coverage (default 50)")
    parser.add_argument("--bootstrap", type=int, default=100, help="refits per draw, 0 for none (default 100)")
    parser.add_argument("--held-out", type=int, default=3, help="draws for the held-out groups (default 3)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="only write a synthetic sweep, 109 runs of the "
                        "published law on a grid like the paper's and 9 outside it")
    parser.add_argument("--noise", type=float, default=NOISE, help=f"of --csv, nats (default {NOISE})")
    args = parser.parse_args(argv)
    if args.csv:
        write_atomically(args.csv, sweep_csv(paper_grid() + outside_grid(), args.noise, 0))
        return
    begin = time.monotonic()
    print(f"80 % intervals of {args.repetitions} draws with noise {NOISE}: share that holds the truth")
    print(f"{'exponent':10} {'profile':>8} {'bootstrap':>10} {'identified at 95 %':>20}")
    for name, shares in coverage(args.repetitions, args.bootstrap).items():
        print(f"{name:10} {shares['profile']:8.2f} {shares['bootstrap']:10.2f} {shares['identified']:20.2f}")
    print(f"({time.monotonic() - begin:.0f} s)")
    if args.held_out:
        print("RMSE on groups held out (nats)")
    squares: dict[str, list[float]] = {"joint": [], "two-stage": []}
    for seed in range(args.held_out):
        for variable, rmse in held_out(seed).items():
            print(f"draw {seed}, by {variable:6}", *(f" {name} {rmse[name]:.5f}" for name in squares), flush=True)
            for name, values in squares.items():
                values.append(rmse[name] ** 2)
    if args.held_out:
        print("all together", *(f" {name} {np.mean(values) ** 0.5:.5f}" for name, values in squares.items()))


if __name__ == "__main__":
    run(main)
