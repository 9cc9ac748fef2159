"""Runs made from the law, on a grid like the paper's, and whether fits give the law back.

`python -m megatron_xmod.scaling.recovery --help` tells what it can count and write.
"""

from __future__ import annotations

import argparse
import csv
import io
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from megatron_xmod.config.schema import RoutingConfig
from megatron_xmod.flops import flops_per_token_paper, model_plan
from megatron_xmod.runtime.entry import run
from megatron_xmod.runtime.files import write_atomically
from megatron_xmod.scaling.buildable import nearest_backbone
from megatron_xmod.scaling.fit import Fit, Problem, fit
from megatron_xmod.scaling.judge import HELD_OUT_BY, Fitter, joint, leave_groups_out, pooled_scores, staged
from megatron_xmod.scaling.law import CHINCHILLA, PUBLISHED, XMOD
from megatron_xmod.scaling.separable import Params, Runs
from megatron_xmod.scaling.uncertainty import bootstrap, profile_interval

NOISE = 0.00876
LEVEL = 0.8
_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_COMPUTE = {165e6: 3e19, 298e6: 5e19, 556e6: 1e20, 936e6: 1.5e20, 1.65e9: 2.5e20}
_DENSE = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}

Cell = tuple[float, int, int, float]  # N_act, L, K, A


def paper_grid() -> list[Cell]:
    """109 runs: the sweeps of appendix B.4. The text leaves K open but in the A-sweep; the rest is chosen to count up.

    K and L at 556M and A = 1 (61 runs, K = 3 only at 2k), N_act at 32k and A = 1 (24), A at 165M and 32k (24).
    """
    lengths = [(556e6, L, K, 1.0) for L in _LENGTHS for K in range(2, 26, 2)] + [(556e6, 2048, 3, 1.0)]
    sizes = [(N, 32768, K, 1.0) for N in (165e6, 298e6, 936e6) for K in (2, 6, 10, 14, 18, 20, 22, 24)]
    strides = [(165e6, 32768, K, A) for A in (0.5, 1.0, 2.0, 3.0, 4.0, 5.0) for K in (4, 8, 12, 16)]
    return lengths + sizes + strides


def outside_grid() -> list[Cell]:
    """The paper's nine runs outside the range of the fit."""
    return [(556e6, 65536, K, 1.0) for K in (16, 18, 20, 22, 24)] + [(1.65e9, 32768, K, 1.0) for K in (14, 16, 18, 20)]


def variables(cells: list[Cell]) -> Runs:
    """Everything that the laws read, N/N_act by layers; the dense loss is Chinchilla's at the dense twin's tokens."""
    rows = []
    for N_act, L, K, A in cells:
        model = nearest_backbone(N_act)[1]
        model = replace(model, routing=RoutingConfig(K=K, A=A))
        plan, C = model_plan(model), _COMPUTE[N_act]
        dense = replace(model, prefix_layers=None)
        rows.append({"N_act": N_act, "L": L, "K": K, "A": A, "C": C, "ratio": plan.layers / model.active_layers,
                     "D_dense": C / (3 * flops_per_token_paper(dense, L)),
                     "D_sparse": C / (3 * flops_per_token_paper(model, L))})
    x = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
    x["dense_loss"] = CHINCHILLA.predict(_DENSE, {"N": x["N_act"], "D": x["D_dense"]})
    return x


def simulate(x: Runs, params: Params, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Validation losses [n] of the law `XMOD`, with normal noise of standard deviation `noise` nats per token."""
    return x["dense_loss"] + XMOD.predict(params, x) + noise * rng.standard_normal(len(x["L"]))


def drawn(seed: int, noise: float = NOISE) -> Problem:
    """The law on one draw of the runs of the paper's grid."""
    x = variables(paper_grid())
    return Problem(XMOD, x, simulate(x, PUBLISHED, noise, np.random.default_rng(seed)), x["dense_loss"])


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


def shares(judge: Callable[[Fit], dict[str, bool]], repetitions: int, seed: int = 0) -> dict[str, float]:
    """In which share of fits to `repetitions` draws `judge` says yes to each exponent."""
    # Other starts than the truth lead to the same minimum, more slowly.
    found = [judge(fit(drawn(seed + i), starts=0, extra=(PUBLISHED,))) for i in range(repetitions)]
    return {e.name: float(np.mean([one[e.name] for one in found])) for e in XMOD.exponents}


def profile_holds(best: Fit) -> dict[str, bool]:
    """Whether the 80 % profile interval of each exponent holds the truth."""
    ends = {e.name: profile_interval(best, e.name, LEVEL) for e in XMOD.exponents}
    return {name: end.low <= PUBLISHED[name] <= end.high for name, end in ends.items()}


def bootstrap_holds(best: Fit, count: int, rng: np.random.Generator) -> dict[str, bool]:
    """Whether the 80 % interval of `count` bootstrap refits holds the truth of each parameter."""
    ends = bootstrap(best, range(len(best.problem.y)), count, rng).intervals(LEVEL)
    return {name: low <= PUBLISHED[name] <= high for name, (low, high) in ends.items()}


def identified(best: Fit) -> dict[str, bool]:
    """Whether the 95 % profile interval of each exponent is narrow enough to call it identified."""
    return {e.name: profile_interval(best, e.name, 0.95).identified for e in XMOD.exponents}


def held_out(seed: int, variable: str, fitter: Fitter) -> float:
    """RMSE (nats) of predicting the groups of L, A or N_act held out, one after the other, on one draw."""
    problem = drawn(seed)
    return pooled_scores(problem, leave_groups_out(problem, variable, fitter))["rmse"]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="recovery", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=50, help="draws for the coverage (default 50)")
    parser.add_argument("--bootstrap", type=int, default=100, help="refits per draw, 0 for none (default 100)")
    parser.add_argument("--held-out", type=int, default=3, help="draws for the held-out groups (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw (default 0)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="only write a synthetic sweep, 109 runs of the "
                        "published law on a grid like the paper's and 9 outside it")
    parser.add_argument("--noise", type=float, default=NOISE, help=f"of --csv, nats (default {NOISE})")
    args = parser.parse_args(argv)
    if args.csv:
        write_atomically(args.csv, sweep_csv(paper_grid() + outside_grid(), args.noise, 0))
        return
    begin = time.monotonic()
    print(f"80 % intervals of {args.repetitions} draws with noise {NOISE}: share that holds the truth")
    judges = {"profile": profile_holds, "identified at 95 %": identified}
    if args.bootstrap:
        judges["bootstrap"] = partial(bootstrap_holds, count=args.bootstrap, rng=np.random.default_rng(args.seed))
    columns = {name: shares(judge, args.repetitions, args.seed) for name, judge in judges.items()}
    print(f"{'exponent':10}", *(f"{name:>18}" for name in columns))
    for exponent in XMOD.exponents:
        print(f"{exponent.name:10}", *(f"{column[exponent.name]:18.2f}" for column in columns.values()))
    print(f"({time.monotonic() - begin:.0f} s)")
    if args.held_out:
        print("RMSE on groups held out (nats)")
    for variable in HELD_OUT_BY if args.held_out else ():
        for name, fitter in (("joint", joint), ("two-stage", staged)):
            rmse = np.array([held_out(args.seed + i, variable, fitter) for i in range(args.held_out)])
            print(f"by {variable:6} {name:10}", *(f"{value:.5f}" for value in rmse),
                  f" together {np.mean(rmse**2) ** 0.5:.5f}", flush=True)


if __name__ == "__main__":
    run(main)
