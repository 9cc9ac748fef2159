"""The learning rate over a run."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from megatron_xmod.config.schema import OptimizerConfig


def lr_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """Share of the highest learning rate at `step` (from 0) of a run of `steps`.

    The warm-up rises as (step + 1) / warm-up steps and ends at 1; without one the first step is at 1. cosine and linear
    fall from there to `min_lr_ratio` at the last step, wsd does so over the last `decay_fraction` of the steps. A run
    that trains on beyond its end stays there.
    """
    warmup = round(config.warmup_fraction * steps)
    if step < warmup:
        return (step + 1) / warmup
    peak = max(warmup - 1, 0)
    last = steps - 1
    if config.schedule == "wsd":
        peak = max(peak, last - round(config.decay_fraction * steps))
    if config.schedule == "constant" or step <= peak or peak == last:
        return 1.0
    progress = min((step - peak) / (last - peak), 1.0)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining


def build_scheduler(optimizer: torch.optim.Optimizer, steps: int, config: OptimizerConfig) -> LambdaLR:
    """Scales each group's own learning rate; call `step` after each optimizer step. Its state_dict resumes it."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, steps, config))
