"""Cross-entropy over a vocabulary that may be sharded.

The logits are the largest tensor of a step (50k of them per token), so they are read in pieces: next to them only their
gradient, in their own dtype, and a piece in fp32 are ever held.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_xmod.parallel.mesh import Mesh

# Of a piece: enough that operators cost nothing, on a GPU too, and little beside the logits.
_PIECE_BYTES = {"cpu": 2**26, "cuda": 2**28}


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor, vocab_size: int, mesh: Mesh) -> Tensor:
    """Loss per token in nats, in fp32 (fp64 for fp64 logits).

    Args:
        logits_BSV: This rank's shard of the padded vocabulary.
        targets_BS: Token ids.
        vocab_size: True number of tokens; logits of the padding beyond it are left out.

    Returns:
        [B, S]
    """
    start = mesh.tensor_rank * logits_BSV.shape[-1]
    width = min(max(vocab_size - start, 0), logits_BSV.shape[-1])
    loss_N = _CrossEntropy.apply(logits_BSV.flatten(0, -2), targets_BS.flatten(), start, width, mesh.tensor_group)
    return loss_N.view_as(targets_BS)


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] of N tokens: the logarithm of the sum of exponentials and the target's logit, both
    combined over the group. Backward makes softmax(logits) - one-hot(target) anew from that logarithm."""

    @staticmethod
    def forward(ctx, logits_NV, targets_N, start, width, group):
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        local_N = targets_N - start
        mine_N = (local_N >= 0) & (local_N < width)
        local_N1 = local_N.where(mine_N, 0).unsqueeze(-1)
        target_N = logits_NV.gather(-1, local_N1).squeeze(-1).to(dtype).masked_fill(~mine_N, 0.0)
        log_sum_N = torch.cat([piece.logsumexp(-1) for piece in _pieces(logits_NV, width, dtype)])
        if group is not None:
            log_sum_N, target_N = _combine(log_sum_N, target_N, group)
        ctx.save_for_backward(logits_NV, log_sum_N, local_N1, mine_N)
        ctx.width = width
        return log_sum_N - target_N

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_N):
        logits_NV, log_sum_N, local_N1, mine_N = ctx.saved_tensors
        result_NV = torch.empty_like(logits_NV)
        result_NV[:, ctx.width:] = 0
        row = 0
        for probabilities in _pieces(logits_NV, ctx.width, log_sum_N.dtype):
            rows = slice(row, row + len(probabilities))
            probabilities = (probabilities - log_sum_N[rows].unsqueeze(-1)).exp_()
            if ctx.width:
                probabilities.scatter_add_(-1, local_N1[rows], -mine_N[rows].unsqueeze(-1).to(probabilities.dtype))
            result_NV[rows, :ctx.width] = probabilities.mul_(gradient_N[rows].unsqueeze(-1))
            row = rows.stop
        return result_NV, None, None, None, None


def _pieces(logits_NV: Tensor, width: int, dtype: torch.dtype):
    """The logits without padding, some rows after another."""
    row_bytes = max(width, 1) * torch.finfo(dtype).bits // 8
    rows = max(1, _PIECE_BYTES[logits_NV.device.type] // row_bytes)
    for piece in logits_NV.split(rows):
        yield piece[:, :width].to(dtype)


def _combine(log_sum_N: Tensor, target_N: Tensor, group) -> tuple[Tensor, Tensor]:
    """log(sum(exp(.))) over the ranks, and the logit of the target from the rank that has it."""
    largest_N = log_sum_N.clone()
    dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((log_sum_N - largest_N).exp(), target_N))
    dist.all_reduce(sums, group=group)
    return largest_N + sums[0].log(), sums[1]
