"""Trains the models that one YAML file names on the same tokens in the same order, and compares them in a report.

Start it again to go on: runs that are done stay, those under way resume, failed ones are tried again.
"""

import argparse
import sys
from pathlib import Path

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.entry import run
from megatron_xmod.sweep import slurm
from megatron_xmod.sweep.plan import Plan, make_plan
from megatron_xmod.sweep.spec import read_spec
from megatron_xmod.sweep.state import DONE, FAILED, State, read_state


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sweep.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="the sweep; see examples/sweeps")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="show the runs and what is left to do, and start nothing")
    what.add_argument("--collect", action="store_true", help="tables and report from what is there; start nothing")
    what.add_argument("--only", type=int, metavar="N", help="just run number N (from 0) and no tables: a task of Slurm")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    plan = make_plan(read_spec(options.config))
    for reason in plan.left_out:
        print(f"left out: {reason}")
    if options.only is not None:
        _one(plan, options.only)
        return
    states = [read_state(run) for run in plan.runs]
    todo = [i for i, state in enumerate(states) if state.status != DONE]
    if options.dry_run:
        _show(plan, states)
    elif options.collect:
        _conclude(plan, states)
    elif plan.spec.launcher == "slurm":
        _show(plan, states)
        _submit(plan, todo)
    else:
        _run(plan, states, todo)


def _run(plan: Plan, states: list[State], todo: list[int]) -> None:
    from megatron_xmod.scaling import require_extra

    require_extra()
    from megatron_xmod.sweep.local import only_sweep, run_all
    from megatron_xmod.sweep.results import write_tables

    output = Path(plan.spec.output)
    print(f"{len(plan.runs)} runs, {len(todo)} to do", flush=True)

    def ended(index: int, state: State) -> None:
        states[index] = state
        write_tables(output, list(zip(plan.runs, states, strict=True)))

    with only_sweep(output):
        stopped = run_all(plan, todo, ended)
        _conclude(plan, states)
    if stopped:
        print(f"stopped by {stopped}. The same command goes on from here.")
    failed = sum(state.status == FAILED for state in states)
    if failed:
        raise UserError(f"{failed} of {len(states)} runs failed; runs.csv has their last words, log.txt in each one's "
                        "folder all of them.")


def _one(plan: Plan, index: int) -> None:
    from megatron_xmod.sweep.local import run_all

    if not 0 <= index < len(plan.runs):
        raise UserError(f"--only {index}: the sweep has the runs 0 to {len(plan.runs) - 1}.")
    if read_state(plan.runs[index]).status == DONE:
        print(f"{plan.runs[index].name} is done")
        return
    found: list[State] = []
    run_all(plan, [index], lambda _, state: found.append(state))
    if found and found[0].status == FAILED:
        raise UserError(f"{plan.runs[index].name} failed: {found[0].error}")


def _submit(plan: Plan, todo: list[int]) -> None:
    if not todo:
        print("nothing to do; --collect makes the tables and the report.")
        return
    path = slurm.write_script(plan, todo, sys.executable, str(Path(__file__)))
    print(f"written: {path}\n\nstart the runs:         {slurm.submit_command(plan, todo)}\n"
          f"tables and the report:  python tools/sweep.py --config {plan.spec.file} --collect")


def _conclude(plan: Plan, states: list[State]) -> None:
    from megatron_xmod.scaling import require_extra

    require_extra()
    from megatron_xmod.sweep.report import write_report
    from megatron_xmod.sweep.results import write_tables

    pairs = list(zip(plan.runs, states, strict=True))
    write_tables(Path(plan.spec.output), pairs)
    counts = {status: sum(s.status == status for s in states) for status in dict.fromkeys(s.status for s in states)}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    print(f"report: {write_report(plan, pairs)}")


def _show(plan: Plan, states: list[State]) -> None:
    width = max(len(run.name) for run in plan.runs)
    print(f"{'#':>3} {'run':{width}} {'status':10} {'steps':>8} {'tokens':>10} {'FLOPs':>10}")
    for i, (planned, state) in enumerate(zip(plan.runs, states, strict=True)):
        steps = planned.config.train.steps
        print(f"{i:>3} {planned.name:{width}} {state.status:10} {steps:>8} {steps * planned.tokens_per_step:>10.3g} "
              f"{steps * planned.flops_per_step:>10.3g}" + (f"  {state.error}" if state.error else ""))
        for change in state.changed:
            print(f"    changed: {change}; the old run will be put aside")
    left = sum(run.config.train.steps * run.flops_per_step
               for run, state in zip(plan.runs, states, strict=True) if state.status != DONE)
    print(f"{sum(state.status != DONE for state in states)} of {len(states)} runs to do, at most {left:.3g} FLOPs")


if __name__ == "__main__":
    run(main)
