"""What all layers of one model share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_xmod.config.schema import ModelConfig
from megatron_xmod.depth import DepthPlan, plan_depth
from megatron_xmod.kernels.registry import TORCH, Kernels, load
from megatron_xmod.model.rope import Rope
from megatron_xmod.parallel.mesh import Mesh


@dataclass
class ModelContext:
    """The settings of a model and the switches that its owner turns while it runs.

    Attributes:
        routing: top_k, as in training: each sparse layer takes the S/K best tokens of the whole sequence. threshold,
            the causal rule: a token enters where the gate's probability is at least 1/2.
        recompute: Backward recomputes blocks and rounds instead of keeping their activations.
        auxiliary_scale: Factor on the gradient of losses that layers attach: 1 / gradient accumulation steps, as the
            engine does with the main loss.
        kernels: The implementation of each operation.
        compile: Blocks and updates of sparse layers run through torch.compile while whole sequences pass under top-k.
        statistics: Where anchor groups put what they did, by name, an entry for each forward; None records nothing.
    """

    config: ModelConfig
    mesh: Mesh = field(default_factory=Mesh)
    routing: Literal["top_k", "threshold"] = "top_k"
    recompute: bool = False
    auxiliary_scale: float = 1.0
    kernels: Kernels = field(default_factory=lambda: load(TORCH))
    compile: bool = False
    statistics: dict[str, list[dict[str, Tensor]]] | None = None

    def __post_init__(self):
        routing = self.config.routing
        self.plan: DepthPlan = plan_depth(self.config.active_layers, self.config.prefix_layers, routing.K, routing.A)
        self.rope = Rope(self.config.head_dim, self.config.rope_theta)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension; weight [D], or [R, D] for x [R, ..., D]."""
        return self.kernels.rms_norm(x, weight, self.config.norm_eps)

    def maybe_compiled(self, function, cache):
        """The function, compiled if `compile` is on and its shapes are static."""
        static = cache is None and self.routing == "top_k"
        return _compiled(function) if self.compile and static else function

    def maybe_recompute(self, function, *inputs):
        """Calls the function, keeping only its inputs for backward if `recompute` is on."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return function(*inputs)


@functools.cache
def _compiled(function: Callable) -> Callable:
    # A graph for each size of a round, with and without gradients; a benchmark has several models in one process.
    return torch.compile(function, fullgraph=True, dynamic=False, recompile_limit=64)
