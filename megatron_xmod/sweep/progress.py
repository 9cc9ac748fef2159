"""Lines that tell how far a sweep is."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from megatron_xmod.runtime.words import duration
from megatron_xmod.sweep.plan import Run
from megatron_xmod.sweep.state import DONE, FAILED, State

_STEP = re.compile(r"^(?:step +|validation at step |resumed from .* at step )(\d+)")
_WORTH_TELLING = re.compile(r"^(?:validation at step|resumed from|stopped at|its settings have changed)|error: ")


class Progress:
    """Says what the runs do. The time left follows from the FLOPs left and the speed since the start.

    Args:
        count: Runs of the sweep.
        todo: Index -> run, of those that will run now.
        say: Called with each line.
    """

    def __init__(self, count: int, todo: dict[int, Run], say: Callable[[str], None] = print):
        self.count, self.todo, self.say = count, todo, say
        self.started = time.monotonic()
        self._first: dict[int, int] = {}  # step at which each run began, this time
        self._steps: dict[int, int] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def begin(self, index: int) -> None:
        run = self.todo[index]
        total = run.config.train.steps * run.flops_per_step
        self._tell(index, f"starts: {run.config.train.steps} steps, {total:.3g} FLOPs")

    def hear(self, index: int, line: str) -> None:
        """A line that a run has printed."""
        found = _STEP.match(line)
        if found:
            with self._lock:
                self._steps[index] = int(found[1])
                self._first.setdefault(index, 0 if line.startswith("step") else int(found[1]))
        if _WORTH_TELLING.search(line):
            left = self.seconds_left()
            rest = f" | sweep: {duration(left)} left" if left is not None else ""
            self._tell(index, line.partition("; the causal rule")[0] + rest)

    def end(self, index: int, state: State) -> None:
        with self._lock:
            self._ended.add(index)
            self._steps.setdefault(index, 0)
        if state.status == DONE:
            took = f" in {duration(state.seconds)}" if state.seconds else ""
            self._tell(index, f"done{took}: causal {state.validation[-1]['loss_causal']:.4f}, top-k "
                       f"{state.validation[-1]['loss_topk']:.4f}")
        else:
            self._tell(index, f"{state.status}{f': {state.error}' if state.error else ''}"
                       f"{'; tried again at the next start' if state.status == FAILED else ''}")

    def seconds_left(self) -> float | None:
        """None before anything is known."""
        with self._lock:
            done = left = 0.0
            for index, run in self.todo.items():
                step = self._steps.get(index, 0)
                done += (step - self._first.get(index, 0)) * run.flops_per_step
                left += 0 if index in self._ended else (run.config.train.steps - step) * run.flops_per_step
            return left * (time.monotonic() - self.started) / done if done > 0 else None

    def _tell(self, index: int, text: str) -> None:
        self.say(f"[{index + 1}/{self.count} {self.todo[index].name}] {text}")
