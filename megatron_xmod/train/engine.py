"""From a configuration to a DeepSpeed engine that is ready to train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import deepspeed
import torch
from pydantic import ValidationError

from megatron_xmod.config.deepspeed import deepspeed_config, gradient_accumulation
from megatron_xmod.config.schema import Config
from megatron_xmod.errors import UserError
from megatron_xmod.flops import layer_flops
from megatron_xmod.kernels.registry import choose_names, load
from megatron_xmod.model.context import ModelContext
from megatron_xmod.parallel.cut import cut_stages, imbalance
from megatron_xmod.parallel.mesh import build_mesh
from megatron_xmod.parallel.pipeline import Pipeline
from megatron_xmod.runtime.distributed import quiet_stdout
from megatron_xmod.train.optimizer import build_optimizer
from megatron_xmod.train.schedule import build_scheduler


@dataclass
class Trainable:
    """A model under its engine.

    Attributes:
        bounds: Pipeline stage i owns layers bounds[i] to bounds[i + 1].
        imbalance: FLOPs of the heaviest stage over the mean.
        kernels: The implementation of each operation, by name.
    """

    engine: deepspeed.PipelineEngine
    context: ModelContext
    bounds: list[int]
    imbalance: float
    kernels: dict[str, str]

    def learning_rates(self) -> dict[str, float]:
        """lr of AdamW, and muon_lr where Muon is used."""
        names = {"adamw": "lr", "muon": "muon_lr"}
        return {names[group["algorithm"]]: group["lr"] for group in self.engine.basic_optimizer.param_groups}


def build_trainable(config: Config) -> Trainable:
    """Builds model, optimizer, schedule and engine. Every process calls it, after `start_distributed`.

    Raises:
        UserError: the layout or the batch can't be shared by the processes, a kernel can't be used, or DeepSpeed
            refuses a key.
    """
    mesh = build_mesh(config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[config.train.precision]
    device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
    names = choose_names(config, device, dtype)
    kernels = load(names)
    context = ModelContext(config.model, mesh, recompute=config.parallel.recompute, kernels=kernels,
                           compile=config.kernels.compile)
    context.auxiliary_scale = 1 / gradient_accumulation(config, mesh.data_size)
    costs = layer_flops(config.model, config.data.seq_length)
    bounds = cut_stages(costs, mesh.pipeline_size)
    # Under bf16 the engine casts the model first and then copies its fp32 master weights from that.
    model = Pipeline(context, bounds, config.train.seed, torch.promote_types(dtype, torch.float32))
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, mesh,
                                zero_stage=config.parallel.zero_stage, adamw=kernels.adamw)
    try:
        with quiet_stdout():
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=deepspeed_config(config, mesh.data_size),
                lr_scheduler=partial(build_scheduler, steps=config.train.steps, config=config.optimizer))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"DeepSpeed refuses {key} in the deepspeed section: {first['msg']}.") from None
    if config.train.precision == "fp64":
        _reduce_in_fp64(engine)
    return Trainable(engine, context, bounds, imbalance(costs, bounds), names)


def _reduce_in_fp64(engine: deepspeed.PipelineEngine) -> None:
    """DeepSpeed reduces gradients in fp32 at most, and refuses types that its accelerator does not list."""
    accelerator = deepspeed.accelerator.get_accelerator()
    supported = {*accelerator.supported_dtypes(), torch.float64}
    accelerator.supported_dtypes = lambda: list(supported)
    engine.communication_data_type = torch.float64
