"""The runs of a sweep on this machine, one after another or side by side."""

from __future__ import annotations

import fcntl
import os
import queue
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import write_errors
from megatron_xmod.sweep.launch import Attempt, machine_gpus, slot_environment
from megatron_xmod.sweep.plan import Plan
from megatron_xmod.sweep.progress import Progress
from megatron_xmod.sweep.state import FAILED, State

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_all(plan: Plan, indices: list[int], ended: Callable[[int, State], None]) -> str | None:
    """Runs some of the runs, `jobs` at a time; a failed one doesn't stop the others.

    On SIGINT, SIGTERM or SIGUSR1 those under way save and end, and no other is started.

    Args:
        indices: Of the runs.
        ended: Called with the index and the state of each run that has ended, by one thread at a time.

    Returns:
        The name of the signal that stopped it, or None.
    """
    spec = plan.spec
    progress = Progress(len(plan.runs), {i: plan.runs[i] for i in indices})
    jobs = spec.jobs or 1
    gpus = [] if all(plan.runs[i].config.train.device == "cpu" for i in indices) else machine_gpus(os.environ)
    slots: queue.Queue[dict[str, str]] = queue.Queue()
    for slot in range(jobs):
        slots.put(slot_environment(spec, slot, os.environ, gpus))
    under_way: dict[int, Attempt] = {}
    stopped: list[str] = []

    def stop(number, frame) -> None:
        stopped.append(signal.Signals(number).name)
        for attempt in list(under_way.values()):
            attempt.stop()

    def one(index: int) -> tuple[int, State] | None:
        if stopped:
            return None
        environment = slots.get()
        attempt = under_way[index] = Attempt(spec, plan.runs[index], environment)
        if stopped:
            attempt.stop()
        progress.begin(index)
        try:
            state = attempt(lambda line: progress.hear(index, line))
        except UserError as error:  # its folder can't be written, say
            state = State(FAILED, error=str(error))
        del under_way[index]
        slots.put(environment)
        progress.end(index, state)
        return index, state

    with _handled(stop), ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(one, index) for index in indices]):
            found = future.result()
            if found:
                ended(*found)
    return stopped[0] if stopped else None


@contextmanager
def only_sweep(output: Path) -> Iterator[None]:
    """Holds the sweep's folder. Raises UserError where another sweep has it."""
    with write_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        file = open(output / ".sweep", "w")  # noqa: SIM115 - open as long as the sweep
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another sweep is running in {output}. Wait for its end, or choose another "
                            "output.") from None
        yield


@contextmanager
def _handled(handler: Callable) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
