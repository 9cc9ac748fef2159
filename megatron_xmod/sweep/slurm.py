"""The script of a Slurm job array: one task per run."""

from __future__ import annotations

import shlex
from math import ceil
from pathlib import Path

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import write_atomically
from megatron_xmod.sweep.plan import Plan

_TASKS_PER_NODE = 8
_SCRIPT = """#!/usr/bin/env bash
# Made by tools/sweep.py: one task of the array is one run. Submit from the folder the sweep was planned in:
#
#   {command}
#
# sbatch's own options come before the script and win over the ones below; more about them, and about containers, in
# examples/slurm/pretrain.sbatch.

#SBATCH --job-name=xmod-{name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
{gpus}#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}/slurm-%A_%a.log

set -uo pipefail
[ -f {sweep} ] || {{ echo "error: submit from the folder the sweep was planned in." >&2; exit 2; }}

# XMOD_PYTHON starts the training under srun (and may be a container's); this one only looks after it.
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}} OMP_WAIT_POLICY=PASSIVE XMOD_PYTHON=${{XMOD_PYTHON:-{python}}}
{python} -u {tool} --config {sweep} --only "$SLURM_ARRAY_TASK_ID" &
run=$!

# On USR1 the run saves and ends well; then the task goes back into the queue, and its next start resumes.
requeue=
trap 'requeue=yes; kill -USR1 "$run"' USR1
wait "$run"
status=$?
if [ "$requeue" ]; then # the trap has ended the first wait
    wait "$run"
    status=$?
    [ "$status" = 0 ] && exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def script_path(plan: Plan) -> Path:
    return Path(plan.spec.output) / "sweep.sbatch"


def submit_command(plan: Plan, indices: list[int]) -> str:
    """The sbatch command that starts these runs."""
    limit = f"%{plan.spec.jobs}" if plan.spec.jobs else ""
    return f"sbatch --array={_ranges(indices)}{limit} {shlex.quote(str(script_path(plan)))}"


def write_script(plan: Plan, indices: list[int], python: str, tool: str) -> Path:
    """Writes the script of the array.

    Args:
        indices: Of the runs to start, for the command in its head.
        python, tool: Interpreter, and path of tools/sweep.py.

    Raises:
        UserError: the processes of a run don't divide evenly over nodes.
    """
    spec = plan.spec
    nodes = ceil(spec.processes / _TASKS_PER_NODE)
    if spec.processes % nodes:
        raise UserError(f"processes is {spec.processes}; beyond {_TASKS_PER_NODE} it must be a multiple of "
                        f"{_TASKS_PER_NODE}, the tasks of a node.")
    tasks = spec.processes // nodes
    gpus = "" if all(run.config.train.device == "cpu" for run in plan.runs) else f"#SBATCH --gres=gpu:{tasks}\n"
    path = script_path(plan)
    write_atomically(path, _SCRIPT.format(
        command=submit_command(plan, indices), name=Path(spec.output).name, nodes=nodes, tasks=tasks, gpus=gpus,
        output=spec.output, sweep=shlex.quote(spec.file), python=shlex.quote(python), tool=shlex.quote(tool)))
    return path


def _ranges(indices: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
