"""What a run says of itself: a console line, metrics.jsonl, TensorBoard, and summary.json at the end."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_xmod.model.statistics import LAYER_FIGURES
from megatron_xmod.parallel.mesh import Mesh
from megatron_xmod.runtime.files import write_atomically, write_errors
from megatron_xmod.runtime.words import duration

Figures = dict[str, dict[str, list[float]]]


def gather_routing(statistics: dict[str, list[dict[str, Tensor]]], mesh: Mesh) -> Figures:
    """What every anchor group of the model did, on every rank: {group: {figure: values}}.

    Values are means over micro-batches and data-parallel ranks. A figure of the layers has a value per sparse layer,
    `coverage` and `overlap` have one.
    """
    own = {group: {name: torch.stack([b[name] for b in batches]).mean(0).reshape(-1).tolist() for name in batches[0]}
           for group, batches in statistics.items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    groups: dict[str, list] = {}
    for figures in everyone[::mesh.tensor_size]:  # the ranks of a tensor-parallel group did the same
        for group, values in figures.items():
            groups.setdefault(group, []).append(values)
    return {group: {name: [sum(column) / len(column) for column in zip(*(p[name] for p in parts), strict=True)]
                    for name in parts[0]} for group, parts in sorted(groups.items())}


def summarise_routing(figures: Figures) -> dict[str, float]:
    """Means over the layers (or groups) of the model, and the largest gap between threshold and top-k of a layer."""
    summary = {}
    for name in (*LAYER_FIGURES, "coverage", "overlap"):
        values = [value for group in figures.values() for value in group.get(name, ())]
        if values:
            summary[name] = sum(values) / len(values)
    gaps = [abs(above - taken) for group in figures.values()
            for above, taken in zip(group["above_threshold"], group["selected"], strict=True)]
    if gaps:
        summary["threshold_gap"] = max(gaps)
    return summary


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes of the process that has the highest: allocated on its GPU, or resident."""
    if device.type == "cuda":
        own = torch.cuda.max_memory_allocated(device)
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    highest = torch.tensor(own, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


class Recorder:
    """Writes the files of a run. Only rank 0 has one.

    Args:
        output: Folder of the run.
        resumed_step: Step that the run goes on from; records of later steps, which a lost run left, are dropped.
    """

    def __init__(self, output: Path, resumed_step: int, tensorboard: bool):
        self.output = output
        self.metrics = output / "metrics.jsonl"
        kept = []
        if resumed_step and self.metrics.exists():
            kept = [line for line in self.metrics.read_text().splitlines() if _step(line) <= resumed_step]
        write_atomically(self.metrics, "".join(f"{line}\n" for line in kept))
        self.writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self.writer = SummaryWriter(output / "tensorboard", purge_step=resumed_step + 1)

    def record(self, step: int, scalars: dict, routing: Figures) -> None:
        """One line of metrics.jsonl, and the same in TensorBoard with every sparse layer."""
        line = json.dumps(_finite({"step": step, **scalars, "routing": summarise_routing(routing)}))
        with write_errors(self.metrics), open(self.metrics, "a") as file:
            file.write(line + "\n")
        if self.writer is not None:
            with write_errors(self.output / "tensorboard"):
                self._write_curves(step, scalars, routing)

    def _write_curves(self, step: int, scalars: dict, routing: Figures) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(f"train/{name}", value, step)
        for group, figures in routing.items():
            for name, values in figures.items():
                for layer, value in enumerate(values):
                    place = f"{group}/layer_{layer:03d}" if name in LAYER_FIGURES else group
                    self.writer.add_scalar(f"routing_{name}/{place}", value, step)
            for layer, (above, taken) in enumerate(zip(figures["above_threshold"], figures["selected"], strict=True)):
                self.writer.add_scalar(f"routing_threshold_gap/{group}/layer_{layer:03d}", above - taken, step)

    def record_validation(self, found: dict) -> None:
        """The result of one evaluation."""
        if self.writer is None:
            return
        step = found["step"]
        for name in ("causal", "topk"):
            self.writer.add_scalar(f"validation/loss_{name}", found[f"loss_{name}"], step)
            for figure, value in found[f"routing_{name}"].items():
                self.writer.add_scalar(f"validation_routing_{name}/{figure}", value, step)
        self.writer.add_scalar("validation/gap", found["loss_causal"] - found["loss_topk"], step)

    def is_finished(self) -> bool:
        """Whether summary.json says that the run came to its last step."""
        try:
            return json.loads((self.output / "summary.json").read_text())["final"]["finished"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def finish(self, summary: dict) -> None:
        """Writes summary.json and closes TensorBoard."""
        write_atomically(self.output / "summary.json", json.dumps(_finite(summary), indent=2) + "\n")
        if self.writer is not None:
            self.writer.close()


def _finite(value):
    """The same with None for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # the torn last line of a killed run


class Console:
    """Lines for people. Silent but on rank 0."""

    def __init__(self, rank: int):
        self.enabled = rank == 0

    def say(self, text: str) -> None:
        if self.enabled:
            print(text, flush=True)

    def step(self, step: int, steps: int, scalars: dict, routing: dict[str, float], seconds_left: float) -> None:
        parts = [f"step {step:>{len(str(steps))}}/{steps}", f"loss {scalars['loss']:.4f}", f"lr {scalars['lr']:.2e}",
                 f"grad {scalars['grad_norm']:.3f}", f"{_engineering(scalars['tokens_per_second'])}tok/s",
                 f"{_engineering(scalars['flops_per_second'])}FLOP/s", f"{scalars['memory_bytes'] / 2**30:.2f} GiB"]
        if routing:
            parts.append(f"coverage {routing['coverage']:.2f}")
            parts.append(f"threshold gap {routing['threshold_gap']:.2f}")
        self.say(" | ".join([*parts, f"{duration(seconds_left)} left"]))


def _engineering(value: float) -> str:
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} "
