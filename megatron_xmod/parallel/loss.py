"""Cross-entropy over a vocabulary that may be sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_xmod.parallel.mesh import Mesh


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor, vocab_size: int, mesh: Mesh) -> Tensor:
    """Loss per token in nats, in fp32 (fp64 for fp64 logits).

    Args:
        logits_BSV: This rank's shard of the padded vocabulary.
        targets_BS: Token ids.
        vocab_size: True number of tokens; logits of the padding beyond it are left out.

    Returns:
        [B, S]
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    start = mesh.tensor_rank * logits_BSV.shape[-1]
    width = min(max(vocab_size - start, 0), logits_BSV.shape[-1])
    if mesh.tensor_group is None:
        logits = logits_BSV[..., :width].to(dtype)
        return F.cross_entropy(logits.flatten(0, -2), targets_BS.flatten(), reduction="none").view_as(targets_BS)
    return _ShardedCrossEntropy.apply(logits_BSV, targets_BS, start, width, dtype, mesh.tensor_group)


class _ShardedCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target], with the largest logit, the sum and the target's logit combined over the group."""

    @staticmethod
    def forward(ctx, logits_BSV, targets_BS, start, width, dtype, group):
        logits = logits_BSV.to(dtype, copy=True)
        logits[..., width:] = float("-inf")
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits -= largest.unsqueeze(-1)
        local = targets_BS - start
        mine = (local >= 0) & (local < width)
        local = local.where(mine, 0).unsqueeze(-1)
        target_logit = logits.gather(-1, local).squeeze(-1).masked_fill_(~mine, 0.0)
        probabilities = logits.exp_()
        sums = torch.stack((probabilities.sum(-1), target_logit))
        dist.all_reduce(sums, group=group)
        probabilities /= sums[0].unsqueeze(-1)
        ctx.save_for_backward(probabilities, local, mine)
        ctx.dtype = logits_BSV.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient_BS):
        probabilities, local, mine = ctx.saved_tensors
        gradient = probabilities.scatter_add(-1, local, -mine.to(probabilities.dtype).unsqueeze(-1))
        gradient *= gradient_BS.unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None, None, None
