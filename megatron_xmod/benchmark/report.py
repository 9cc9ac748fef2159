"""From measurements to rows, a table and files."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from statistics import median

import torch

from megatron_xmod.benchmark.measure import PHASES, Measured
from megatron_xmod.benchmark.subjects import Subject
from megatron_xmod.runtime.files import write_atomically

# Dense bf16 peak of one GPU in FLOP/s, by a part of its name (the makers' data sheets).
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


def rows(subjects: list[Subject], found: dict[str, Measured], tokens_per_step: int, device: torch.device) -> list[dict]:
    """One row per subject. Efficiency compares with the subject named "dense", where there is one:
    (t_dense / t) / (FLOPs_dense / FLOPs), 1 if a variant is as much faster as its FLOPs are fewer; of the whole step,
    and of forward and backward alone (the optimizer's time grows with the parameters, and its FLOPs are not counted).
    """
    made = [_row(subject, found[subject.name], tokens_per_step, device) for subject in subjects]
    dense = next((row for row in made if row["variant"] == "dense"), None)
    for row in made:
        if dense:
            speed = dense["step_seconds"] / row["step_seconds"]
            row["speed_over_dense"] = speed
            flops = dense["flops_per_step"] / row["flops_per_step"]
            row["efficiency"] = speed / flops
            row["efficiency_forward_backward"] = _forward_backward(dense) / _forward_backward(row) / flops
            row["launches_over_dense"] = (row["kernel_launches"] - row["selection_launches"]) / dense["kernel_launches"]
    return made


def _forward_backward(row: dict) -> float:
    return row["forward_seconds"] + row["backward_seconds"]


def _row(subject: Subject, measured: Measured, tokens_per_step: int, device: torch.device) -> dict:
    steps = measured.step_seconds()
    seconds, flops = median(steps), subject.flops_per_token * tokens_per_step
    row = {"variant": subject.name, "step_seconds": seconds, "step_seconds_min": min(steps),
           "step_seconds_max": max(steps), **{f"{p}_seconds": median(measured.seconds[p]) for p in PHASES},
           "tokens_per_second": tokens_per_step / seconds, "flops_per_step": flops, "flops_per_second": flops / seconds,
           "parameters": subject.parameters(), "peak_memory_bytes": measured.peak_memory_bytes,
           "kernel_launches": measured.launches, "selection_launches": measured.selection_launches}
    bf16 = next(subject.model.parameters()).dtype == torch.bfloat16
    peak = _peak(device) if bf16 else None
    return row | ({"mfu": flops / seconds / peak} if peak else {})


def _peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "PCIe" in name:
        return None  # slower than its namesakes
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def machine(device: torch.device) -> str:
    """What it ran on, in a line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else \
        f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def table(made: list[dict]) -> str:
    """The rows as Markdown."""
    columns = [("variant", "variant", "{}"), ("step s (median)", "step_seconds", "{:.3f}"),
               ("min", "step_seconds_min", "{:.3f}"), ("max", "step_seconds_max", "{:.3f}"),
               *((phase, f"{phase}_seconds", "{:.3f}") for phase in PHASES),
               ("tok/s", "tokens_per_second", "{:.0f}"), ("GFLOP/s", "flops_per_second", "G"),
               ("MFU", "mfu", "{:.3f}"), ("speed / dense", "speed_over_dense", "{:.3f}"),
               ("efficiency", "efficiency", "{:.3f}"),
               ("fwd + bwd", "efficiency_forward_backward", "{:.3f}"), ("launches", "kernel_launches", "{}"),
               ("of selection", "selection_launches", "{}"), ("peak GiB", "peak_memory_bytes", "GiB"),
               ("M parameters", "parameters", "M")]
    columns = [c for c in columns if any(c[1] in row for row in made)]
    lines = ["| " + " | ".join(c[0] for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(key), form) for _, key, form in columns) + " |" for row in made]
    return "\n".join(lines)


def _cell(value, form: str) -> str:
    if value is None:
        return ""
    scale = {"G": 1e9, "M": 1e6, "GiB": 2**30}
    return f"{value / scale[form]:.2f}" if form in scale else form.format(value)


def save(made: list[dict], file: Path, command: str, device: torch.device) -> None:
    """Writes the rows as JSON, and the table as Markdown beside it."""
    head = {"command": command, "machine": machine(device)}
    write_atomically(file, json.dumps({**head, "rows": made}, indent=2) + "\n")
    text = f"{table(made)}\n\n{head['machine']}\n\n    {command}\n"
    write_atomically(file.with_suffix(".md"), text)
