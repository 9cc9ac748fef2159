"""Causal attention of whole sequences: every token sees itself and those before it.

Shapes: B batch (any leading dimensions), S tokens, H query heads, G key/value heads, E head dim. Query head h reads
key/value head h // (H/G).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def sdpa(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor) -> Tensor:
    """[B, S, H, E], by torch's scaled_dot_product_attention."""
    q_BHSE, k_BGSE, v_BGSE = (x.flatten(0, -4).transpose(1, 2) for x in (q_BSHE, k_BSGE, v_BSGE))
    y_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BGSE, v_BGSE, is_causal=True,
                                            enable_gqa=q_BHSE.shape[1] != k_BGSE.shape[1])
    return y_BHSE.transpose(1, 2).reshape(q_BSHE.shape)


def flash_attn(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor) -> Tensor:
    """[B, S, H, E], by the package flash-attn (Dao, arXiv 2307.08691)."""
    from flash_attn import flash_attn_func

    y_BSHE = flash_attn_func(*(x.flatten(0, -4) for x in (q_BSHE, k_BSGE, v_BSGE)), causal=True)
    return y_BSHE.view(q_BSHE.shape)
