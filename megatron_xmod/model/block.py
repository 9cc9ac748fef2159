"""The transformer block: attention and feed-forward updates, for one layer or a stack of layers of the same shape.

Shapes: B batch, S tokens, D width, H query heads, G key/value heads, E head dim, F ffn, R layers in the stack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_xmod.model.context import ModelContext
from megatron_xmod.model.rope import rotate
from megatron_xmod.parallel.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megatron_xmod.parallel.tensor import new_parameter, output_init_std


class LayerWeights(NamedTuple):
    """The weights of one layer (under tensor parallelism, this rank's shards)."""

    attention_norm: Tensor  # [D]
    q_proj: Tensor          # [H*E, D]
    k_proj: Tensor          # [G*E, D]
    v_proj: Tensor          # [G*E, D]
    q_norm: Tensor          # [E]
    k_norm: Tensor          # [E]
    o_proj: Tensor          # [D, H*E]
    mlp_norm: Tensor        # [D]
    gate_proj: Tensor       # [F, D]
    up_proj: Tensor         # [F, D]
    down_proj: Tensor       # [D, F]


class Block(nn.Module):
    """A dense decoder layer; with `layers`, the weights of a stack of layers, each parameter [R, ...].

    Args:
        layers: R, the layers in the stack; None for a single layer without that dimension.
    """

    def __init__(self, context: ModelContext, layers: int | None = None):
        super().__init__()
        self.context = context
        config, mesh = context.config, context.mesh
        D, heads, kv, ffn = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim, \
            config.ffn_size
        lead = () if layers is None else (layers,)
        std, out_std = config.init_std, output_init_std(config.init_std, config.active_layers)

        def norm(width):
            return new_parameter((*lead, width), mesh)

        def column(rows):
            return new_parameter((*lead, rows, D), mesh, kind="matrix", tensor_parallel_dim=len(lead), init_std=std)

        def row(columns):
            return new_parameter((*lead, D, columns), mesh, kind="matrix", tensor_parallel_dim=len(lead) + 1,
                                 init_std=out_std)

        weights = LayerWeights(norm(D), column(heads), column(kv), column(kv), norm(config.head_dim),
                               norm(config.head_dim), row(heads), norm(D), column(ffn), column(ffn), row(ffn))
        for name, parameter in weights._asdict().items():
            self.register_parameter(name, parameter)

    def weights(self) -> LayerWeights:
        """The parameters as they are stored."""
        return LayerWeights(*(getattr(self, name) for name in LayerWeights._fields))

    def unbind(self) -> list[LayerWeights]:
        """The weights of each layer of the stack.

        `unbind` and not indexing: in backward each index would make a gradient as large as the whole stack.
        """
        return [LayerWeights(*layer) for layer in zip(*(p.unbind() for p in self.weights()), strict=True)]

    def forward(self, x_BSD: Tensor, cache=None) -> Tensor:
        """The dense layer, x + a + f, [B, S, D]."""
        return self.context.maybe_recompute(self._dense, x_BSD, cache)

    def _dense(self, x_BSD, cache):
        start = 0 if cache is None else cache.length
        positions_S = torch.arange(start, start + x_BSD.shape[1], device=x_BSD.device)
        angles = self.context.rope(positions_S.unsqueeze(0), start + x_BSD.shape[1], x_BSD.dtype)
        run = self.context.maybe_compiled(_dense_block, cache)
        return run(x_BSD, self.weights(), angles, self.context, cache and cache.layer(self, 0))


def _dense_block(x_BSD, w: LayerWeights, angles, context: ModelContext, cache):
    x_BSD = x_BSD + attention_update(context.norm(x_BSD, w.attention_norm), w, angles, context, cache)
    return x_BSD + mlp_update(context.norm(x_BSD, w.mlp_norm), w, context)


def attention_update(normed_BSD: Tensor, w: LayerWeights, angles: tuple[Tensor, Tensor], context: ModelContext,
                     cache=None) -> Tensor:
    """What causal self-attention adds to the tokens whose RMSNorm this is, [B, S, D].

    With the weights of a stack, each [R, ...], there is R in front and layer r works on its part; so do the others.

    Args:
        angles: Cosine and sine of the tokens' positions, [B or 1, S, E/2].
        cache: This layer's LayerCache; keys and values of earlier tokens are read from it and the new ones added.
    """
    group, E = context.mesh.tensor_group, context.config.head_dim
    x_BSD = copy_to_tensor_parallel(normed_BSD, group)
    # The head norms are the same on every rank, but each rank sees its own heads only: gradients are summed too.
    q_norm, k_norm = copy_to_tensor_parallel(w.q_norm, group), copy_to_tensor_parallel(w.k_norm, group)
    q_BSHE = rotate(context.norm(linear(x_BSD, w.q_proj).unflatten(-1, (-1, E)), q_norm), *angles)
    k_BSGE = rotate(context.norm(linear(x_BSD, w.k_proj).unflatten(-1, (-1, E)), k_norm), *angles)
    v_BSGE = linear(x_BSD, w.v_proj).unflatten(-1, (-1, E))
    if cache is not None:
        k_BSGE, v_BSGE = cache.append(k_BSGE, v_BSGE)
    # Without earlier tokens it is the attention of a whole sequence.
    whole = q_BSHE.shape[-3] == k_BSGE.shape[-3]
    y_BSHE = (context.kernels.attention if whole else attend_to_earlier)(q_BSHE, k_BSGE, v_BSGE)
    return reduce_from_tensor_parallel(linear(y_BSHE.flatten(-2), w.o_proj), group)


def attend_to_earlier(q_BSHE: Tensor, k_BTGE: Tensor, v_BTGE: Tensor) -> Tensor:
    """Causal attention of the last S of T tokens, [B, S, H, E]; query head h reads key/value head h // (H/G)."""
    S, T = q_BSHE.shape[1], k_BTGE.shape[1]
    mask = None if S == 1 else torch.ones(S, T, dtype=torch.bool, device=q_BSHE.device).tril(T - S)
    y_BHSE = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q_BSHE, k_BTGE, v_BTGE)), attn_mask=mask,
                                            enable_gqa=q_BSHE.shape[2] != k_BTGE.shape[2])
    return y_BHSE.transpose(1, 2)


def mlp_update(normed_BSD: Tensor, w: LayerWeights, context: ModelContext) -> Tensor:
    """What the SwiGLU feed-forward adds to the tokens whose RMSNorm this is, [B, S, D]."""
    group = context.mesh.tensor_group
    x_BSD = copy_to_tensor_parallel(normed_BSD, group)
    hidden_BSF = F.silu(linear(x_BSD, w.gate_proj)) * linear(x_BSD, w.up_proj)
    return reduce_from_tensor_parallel(linear(hidden_BSF, w.down_proj), group)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x times the weight [out, in]; or layer by layer, x [R, ..., in] and weight [R, out, in]."""
    if weight.dim() == 2:
        return F.linear(x, weight)
    return _StackedLinear.apply(x, weight)


class _StackedLinear(torch.autograd.Function):
    """bmm(x, weight.mT). Autograd's own backward gives the weight's gradient transposed, and then copies it whole into
    the layout of the weight. The result is no view: the sum over tensor-parallel ranks is written into it."""

    @staticmethod
    def forward(ctx, x, weight_ROI):
        ctx.save_for_backward(x, weight_ROI)
        y_RNO = torch.bmm(x.flatten(1, -2), weight_ROI.mT)
        return torch.ops.aten._unsafe_view(y_RNO, (*x.shape[:-1], weight_ROI.shape[1]))

    @staticmethod
    def backward(ctx, gradient):
        x, weight_ROI = ctx.saved_tensors
        gradient_RNO = gradient.flatten(1, -2)
        x_gradient = torch.bmm(gradient_RNO, weight_ROI).view_as(x)
        return x_gradient, torch.bmm(gradient_RNO.mT, x.flatten(1, -2))
