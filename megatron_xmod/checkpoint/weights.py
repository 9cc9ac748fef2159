"""The whole model of a checkpoint in one process, whatever layout it was saved with."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_xmod.checkpoint import store
from megatron_xmod.config.schema import Config
from megatron_xmod.errors import UserError
from megatron_xmod.model.build import Transformer
from megatron_xmod.model.context import ModelContext


def load_transformer(path: str | Path) -> tuple[Transformer, Config]:
    """The model, in fp32 on the CPU, and the settings of its run.

    Args:
        path: A run's folder, its checkpoints folder (either stands for the newest checkpoint) or one checkpoint.

    Raises:
        UserError: no checkpoint is there, or a file of it is missing, damaged or of another model.
    """
    folder = store.locate(path)
    config, _ = store.describe(folder)
    model = Transformer(ModelContext(config.model))
    for index, layer in enumerate(model.layers):
        shards = [_read(folder / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
                  for rank in range(config.parallel.tensor_parallel_size)]
        _fill(layer, shards, f"{folder.name}, layer {index}")
    return model, config


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{file} is missing; the checkpoint is incomplete. Use another one.") from None
    except Exception as error:  # noqa: BLE001 - torch raises anything on a damaged file
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{file} can't be read ({reason}). Use another checkpoint.") from None


@torch.no_grad()
def _fill(layer: nn.Module, shards: list[dict[str, Tensor]], place: str) -> None:
    parameters = dict(layer.named_parameters())
    for shard in shards:
        if shard.keys() != parameters.keys():
            odd = sorted(shard.keys() ^ parameters.keys())
            raise UserError(f"{place}: the parameters differ from the model's in {', '.join(odd)}.")
    for name, parameter in parameters.items():
        dim = parameter.tensor_parallel_dim
        whole = shards[0][name] if dim is None else torch.cat([shard[name] for shard in shards], dim)
        if whole.shape != parameter.shape:
            raise UserError(f"{place}: {name} has shape {tuple(whole.shape)}, the model {tuple(parameter.shape)}.")
        parameter.copy_(whole)
