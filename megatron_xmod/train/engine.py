"""From a configuration to a DeepSpeed engine that is ready to train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import deepspeed
import torch

from megatron_xmod.config.deepspeed import deepspeed_config, gradient_accumulation
from megatron_xmod.config.schema import Config
from megatron_xmod.flops import layer_flops
from megatron_xmod.model.context import ModelContext
from megatron_xmod.parallel.cut import cut_stages, imbalance
from megatron_xmod.parallel.mesh import build_mesh
from megatron_xmod.parallel.pipeline import Pipeline
from megatron_xmod.train.optimizer import build_optimizer
from megatron_xmod.train.schedule import build_scheduler

# What the engine casts to by itself (bf16) starts as fp32: its master weights then are the fp32 initial values.
_START_DTYPE = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


@dataclass
class Trainable:
    """A model under its engine.

    Attributes:
        bounds: Pipeline stage i owns layers bounds[i] to bounds[i + 1].
        imbalance: FLOPs of the heaviest stage over the mean.
    """

    engine: deepspeed.PipelineEngine
    context: ModelContext
    bounds: list[int]
    imbalance: float


def build_trainable(config: Config) -> Trainable:
    """Builds model, optimizer, schedule and engine. Every process calls it, after `start_distributed`."""
    mesh = build_mesh(config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size)
    context = ModelContext(config.model, mesh, recompute=config.parallel.recompute)
    context.auxiliary_scale = 1 / gradient_accumulation(config, mesh.data_size)
    costs = layer_flops(config.model, config.data.seq_length)
    bounds = cut_stages(costs, mesh.pipeline_size)
    model = Pipeline(context, bounds, config.train.seed).to(_START_DTYPE[config.train.precision])
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, mesh,
                                zero_stage=config.parallel.zero_stage)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(config, mesh.data_size),
        lr_scheduler=partial(build_scheduler, steps=config.train.steps, config=config.optimizer))
    if config.train.precision == "fp64":
        _reduce_in_fp64(engine)
    return Trainable(engine, context, bounds, imbalance(costs, bounds))


def _reduce_in_fp64(engine: deepspeed.PipelineEngine) -> None:
    """DeepSpeed reduces gradients in fp32 at most, and refuses types that its accelerator does not list."""
    accelerator = deepspeed.accelerator.get_accelerator()
    supported = {*accelerator.supported_dtypes(), torch.float64}
    accelerator.supported_dtypes = lambda: list(supported)
    engine.communication_data_type = torch.float64
