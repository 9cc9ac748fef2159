"""Toy models for the tests. No parameter keeps a neutral value (norm 1, bias 0), so that none can be left out unseen.

Shapes: B batch, S sequence, D width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_xmod.config.schema import ModelConfig, RoutingConfig
from megatron_xmod.model.build import Transformer
from megatron_xmod.model.context import ModelContext

# Groups of 2 and 6 sparse layers. Weights are large and the rotary base small: routing, attention and positions matter.
TOY = ModelConfig(hidden_size=16, ffn_size=24, heads=4, kv_heads=2, head_dim=8, vocab_size=29, vocab_multiple=8,
                  active_layers=5, prefix_layers=1, rope_theta=100.0, init_std=0.3,
                  routing=RoutingConfig(K=4, A=1.5, loss_coefficient=0.5))
# The published baseline: one sparse layer before each anchor, neither bias nor scale.
MOD = replace(TOY, prefix_layers=1, active_layers=6, routing=RoutingConfig(
    K=4, A=1 / 4, bias_scale=0.0, router_bias=False, residual_scale=False, gate="ffn", loss_coefficient=0.5))
DENSE = replace(TOY, prefix_layers=None)


def make_context(config: ModelConfig = TOY, *, mode: str = "top_k", model: dict | None = None,
                 **routing) -> ModelContext:
    """The context of a changed configuration: `model` changes its fields, `routing` those of the routing."""
    config = replace(config, **(model or {}), routing=replace(config.routing, **routing))
    return ModelContext(config, routing=mode)


def make_model(context: ModelContext, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    """A model whose constants are scrambled too."""
    return scramble(Transformer(context, seed), seed).to(dtype)


@torch.no_grad()
def scramble(module: nn.Module, seed: int = 0) -> nn.Module:
    """Moves parameters with a constant initial value away from it, and fills uninitialised ones."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.init_std is None:
            parameter.fill_(parameter.init_value)
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        else:
            parameter.normal_(0.0, parameter.init_std, generator=generator)
    return module


def make_tokens(context: ModelContext, batch: int, length: int, seed: int = 0) -> Tensor:
    """[B, S] token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, context.config.vocab_size, (batch, length), generator=generator)


def make_hidden(context: ModelContext, batch: int, length: int, dtype: torch.dtype = torch.float64,
                seed: int = 0) -> Tensor:
    """[B, S, D], normal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, context.config.hidden_size, generator=generator, dtype=torch.float64).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The tensor's bits as integers: tells -0.0 from 0.0."""
    return x.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||."""
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
