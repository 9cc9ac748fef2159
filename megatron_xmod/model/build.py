"""The list of layers of a model, and a plain module that runs it in one process.

The list is [Embedding, Block x prefix, AnchorGroup x groups, Norm, Head]; a pipeline stage is a range of it.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_xmod.model.block import Block
from megatron_xmod.model.context import ModelContext
from megatron_xmod.model.sparse import AnchorGroup
from megatron_xmod.parallel.collectives import copy_to_tensor_parallel
from megatron_xmod.parallel.tensor import VocabEmbedding, initialise, new_parameter


class FinalNorm(nn.Module):
    """RMSNorm before the head."""

    def __init__(self, context: ModelContext):
        super().__init__()
        self.context = context
        self.weight = new_parameter((context.config.hidden_size,), context.mesh)

    def forward(self, x_BSD: Tensor, cache=None) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        return self.context.norm(x_BSD, self.weight)


class Head(nn.Module):
    """Logits over the padded vocabulary, sharded over the tensor-parallel ranks."""

    def __init__(self, context: ModelContext):
        super().__init__()
        self.context = context
        config = context.config
        self.weight = new_parameter((config.padded_vocab_size, config.hidden_size), context.mesh, kind="embedding",
                                    tensor_parallel_dim=0, init_std=config.init_std)

    def forward(self, x_BSD: Tensor, cache=None) -> Tensor:
        """[B, S, D] -> [B, S, V / tensor-parallel size]"""
        return nn.functional.linear(copy_to_tensor_parallel(x_BSD, self.context.mesh.tensor_group), self.weight)


def layer_count(context: ModelContext) -> int:
    """Length of the list of layers."""
    return 1 + context.plan.prefix_layers + len(context.plan.groups) + 2


def build_layer(context: ModelContext, index: int, seed: int) -> nn.Module:
    """The layer at a place of the list, initialised; the same for every parallel layout."""
    plan, config = context.plan, context.config
    group = index - 1 - plan.prefix_layers
    if index == 0:
        layer = VocabEmbedding(config.padded_vocab_size, config.hidden_size, context.mesh, config.init_std)
    elif group < 0:
        layer = Block(context)
    elif group < len(plan.groups):
        layer = AnchorGroup(context, plan.rounds(group), f"group_{group:02d}")
    else:
        layer = (FinalNorm, Head)[group - len(plan.groups)](context)
    initialise(layer, str(index), seed, context.mesh)
    return layer


class Transformer(nn.Module):
    """The whole model in one process (or one tensor-parallel group)."""

    def __init__(self, context: ModelContext, seed: int = 0):
        super().__init__()
        self.context = context
        self.layers = nn.ModuleList(build_layer(context, i, seed) for i in range(layer_count(context)))

    def forward(self, tokens_BS: Tensor, cache=None) -> Tensor:
        """Logits [B, S, V / tensor-parallel size] of the padded vocabulary.

        Args:
            cache: A KVCache that holds the tokens before these.

        Raises:
            ValueError: with a cache, for a batch of several sequences (they would keep different tokens in a layer) or
                for top-k routing (it would need the tokens to come).
        """
        if cache is not None and (tokens_BS.shape[0] != 1 or self.context.routing != "threshold"):
            raise ValueError("a cache serves one sequence under threshold routing; this is a batch of "
                             f"{tokens_BS.shape[0]} under {self.context.routing}")
        x = tokens_BS
        for layer in self.layers:
            x = layer(x, cache)
        if cache is not None:
            cache.length += tokens_BS.shape[1]
        return x
