"""Timing the phases of training steps, subjects in turn, so that a machine that slows down slows them all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_xmod.benchmark.subjects import Subject
from megatron_xmod.model.sparse import SELECTION

PHASES = ("forward", "backward", "optimizer")


@dataclass
class Measured:
    """What one subject gave: seconds of each phase by step, and of one step launches and peak memory."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    launches: int = 0
    selection_launches: int = 0
    peak_memory_bytes: int = 0

    def step_seconds(self) -> list[float]:
        return [sum(phases) for phases in zip(*self.seconds.values(), strict=True)]


class Clock:
    """Seconds between marks: of the device where it is a GPU, otherwise of the wall."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        if not self.cuda:
            return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in zip(self.marks, self.marks[1:], strict=False)]


def train_step(subject: Subject, micro_batches: list[Tensor], device: torch.device) -> list[float]:
    """Seconds of forward, backward and optimizer of one step, each summed over the micro-batches."""
    totals = dict.fromkeys(PHASES, 0.0)
    for tokens in micro_batches:
        clock = Clock(device)
        clock.mark()
        loss = subject.loss(tokens) / len(micro_batches)
        clock.mark()
        loss.backward()
        clock.mark()
        for phase, seconds in zip(PHASES, clock.laps(), strict=False):
            totals[phase] += seconds
    clock = Clock(device)
    clock.mark()
    subject.optimizer.step()
    subject.optimizer.zero_grad()
    clock.mark()
    totals["optimizer"] = clock.laps()[0]
    return list(totals.values())


def measure(subjects: list[Subject], tokens: Iterator[Tensor], steps: int, accumulation: int, warm_up: int,
            device: torch.device, say=print) -> dict[str, Measured]:
    """Times `steps` steps of every subject, one after another, round after round; the first `warm_up` don't count.

    In every round all subjects get the same tokens. Launches and memory are those of a step more, after the warm-up.
    """
    found = {subject.name: Measured() for subject in subjects}
    for number in range(-warm_up, steps):
        micro_batches = [next(tokens) for _ in range(accumulation)]
        for subject in subjects:
            with subject.on(device):
                if device.type == "cuda":  # the allocator gets to know this subject's sizes again
                    train_step(subject, micro_batches, device)
                if number == 0:
                    _look_inside(subject, micro_batches, device, found[subject.name])
                seconds = train_step(subject, micro_batches, device)
            if number >= 0:
                for phase, value in zip(PHASES, seconds, strict=True):
                    found[subject.name].seconds[phase].append(value)
            say(f"{'warm-up' if number < 0 else f'step {number + 1}/{steps}'}  {subject.name:20s} "
                f"{sum(seconds):8.3f} s")
    return found


def _look_inside(subject: Subject, micro_batches: list[Tensor], device: torch.device, into: Measured) -> None:
    """Launches and peak memory of one step, weights and optimizer included."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, profile_memory=not cuda) as profiler:
        train_step(subject, micro_batches, device)
    events = profiler.events()
    if cuda:
        on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        spans = [e.time_range for e in on_gpu if e.is_user_annotation and e.name == SELECTION]
        kernels = [e.time_range.start for e in on_gpu if not e.is_user_annotation]
        into.launches = len(kernels)
        into.selection_launches = sum(any(s.start <= start < s.end for s in spans) for start in kernels)
        into.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        return
    leaves = [e for e in events if e.name.startswith("aten::") and not _has_operators(e)]
    into.launches = len(leaves)
    into.selection_launches = sum(_inside_selection(e) for e in leaves)
    standing = sum(p.numel() * p.element_size() for p in subject.model.parameters())
    standing += sum(v.numel() * v.element_size() for s in subject.optimizer.state.values() for v in s.values())
    into.peak_memory_bytes = standing + _peak_allocated(profiler)


def _has_operators(event) -> bool:
    return any(child.name.startswith("aten::") for child in event.cpu_children)


def _inside_selection(event) -> bool:
    while event is not None:
        if event.name == SELECTION:
            return True
        event = event.cpu_parent
    return False


def _peak_allocated(profiler: profile) -> int:
    """Highest sum of what was allocated and not yet freed during the profile, in bytes."""
    memory = sorted((e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"),
                    key=lambda e: e.start_ns())
    total = peak = 0
    for event in memory:
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def write_trace(subject: Subject, tokens: Tensor, device: torch.device, file: Path) -> None:
    """A step's trace to open in a browser (chrome://tracing, Perfetto)."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with subject.on(device), profile(activities=activities) as profiler:
        train_step(subject, [tokens], device)
    profiler.export_chrome_trace(str(file))
