"""The tokens of every layer of an exclusive round by one Triton kernel, one program per sequence.

A layer takes the `count` highest scores among the tokens that are left. The lowest of those is found two bits at a time
on integers that order as the scores do, then one pass in order of position picks, the earlier of equal scores first.

Shapes: B batch, S sequence, K tokens kept per layer and sequence, R layers in the round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 8192  # eight tokens for each thread of 32 warps


@triton.jit
def _ordered(score, INT: tl.constexpr, UINT: tl.constexpr, BITS: tl.constexpr):
    """Unsigned integers in the order of the scores: 0.0 equals -0.0, NaN is highest, and all are above 0."""
    number = tl.where(score == 0.0, 0.0, score).to(INT, bitcast=True)
    sign = tl.full((), 1, UINT) << (BITS - 1)
    # All bits of a negative number turn, of others the sign only.
    key = number.to(UINT, bitcast=True) ^ ((number >> (BITS - 1)).to(UINT, bitcast=True) | sign)
    return tl.where(score != score, sign | (sign - 1), key)


@triton.jit
def _load_keys(keys, here, length, UINT: tl.constexpr):
    return tl.load(keys + here, mask=here < length, other=0).to(UINT, bitcast=True)


@triton.jit
def _select(score, owner, positions, keys, batch, length, layers, count, batch_stride, token_stride, layer_stride,
            INT: tl.constexpr, UINT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    score += sequence * batch_stride
    owner += sequence * length
    keys += sequence * length
    token = tl.arange(0, BLOCK)
    for layer in range(layers):
        # Keys of the tokens that are left; 0 for the others.
        for start in range(0, length, BLOCK):
            here = start + token
            inside = here < length
            left = inside & (tl.load(owner + here, mask=inside & (layer > 0), other=layers) == layers)
            value = tl.load(score + here.to(tl.int64) * token_stride + layer * layer_stride, mask=left, other=0.0)
            key = tl.where(left, _ordered(value, INT, UINT, BITS), 0)
            tl.store(keys + here, key.to(INT, bitcast=True), mask=inside)
        tl.debug_barrier()  # other threads may read what this one wrote

        # The largest threshold that at least `count` keys reach.
        threshold = tl.full((), 0, UINT)
        unit = tl.full((), 1, UINT) << (BITS - 2)
        for _ in range(BITS // 2):
            one = threshold + unit
            two = one + unit
            three = two + unit
            reach_one = tl.zeros([BLOCK], tl.int32)
            reach_two = tl.zeros([BLOCK], tl.int32)
            reach_three = tl.zeros([BLOCK], tl.int32)
            for start in range(0, length, BLOCK):
                key = _load_keys(keys, start + token, length, UINT)
                reach_one += (key >= one).to(tl.int32)
                reach_two += (key >= two).to(tl.int32)
                reach_three += (key >= three).to(tl.int32)
            threshold = tl.where(tl.sum(reach_one, 0) >= count, one, threshold)
            threshold = tl.where(tl.sum(reach_two, 0) >= count, two, threshold)
            threshold = tl.where(tl.sum(reach_three, 0) >= count, three, threshold)
            unit = unit >> 2

        above = tl.zeros([BLOCK], tl.int32)
        for start in range(0, length, BLOCK):
            above += (_load_keys(keys, start + token, length, UINT) > threshold).to(tl.int32)
        wanted_ties = count - tl.sum(above, 0)

        taken = 0
        ties = 0
        first_place = (layer * batch + sequence) * count
        for start in range(0, length, BLOCK):
            here = start + token
            key = _load_keys(keys, here, length, UINT)
            tie = (key == threshold).to(tl.int32)
            take = (key > threshold) | ((tie > 0) & (ties + tl.cumsum(tie, 0) <= wanted_ties))
            place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
            tl.store(positions + first_place + place, here, mask=take)
            tl.store(owner + here, tl.where(take, layer, layers), mask=(here < length) & (take | (layer == 0)))
            taken += tl.sum(take.to(tl.int32), 0)
            ties += tl.sum(tie, 0)
        tl.debug_barrier()


@torch.no_grad()
def select_round(score_BSR: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each layer in turn takes the `count` tokens it scores highest among those left; of equal scores, the earlier.

    Fastest where the scores of a layer lie side by side in memory, as in a transposed [B, R, S].

    Args:
        score_BSR: fp32 or fp64 (others are widened), of any strides. NaN counts as highest, as in torch.sort.
        count: K, with R * K <= S.

    Returns:
        owner [B, S], the layer that takes a token, R for none; positions [R, B, K] in ascending order; int64.
    """
    B, S, R = score_BSR.shape
    assert R * count <= S, f"{R} layers can't each take {count} of {S} tokens"
    if score_BSR.dtype != torch.float64:
        score_BSR = score_BSR.float()
    owner_BS = torch.empty(B, S, dtype=torch.int64, device=score_BSR.device)
    positions_RBK = torch.empty(R, B, count, dtype=torch.int64, device=score_BSR.device)
    if not positions_RBK.numel():
        return owner_BS.fill_(R), positions_RBK
    wide = score_BSR.dtype == torch.float64
    keys_BS = torch.empty(B, S, dtype=torch.int64 if wide else torch.int32, device=score_BSR.device)
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(S))
    _select[B,](
        score_BSR, owner_BS, positions_RBK, keys_BS, B, S, R, count, *score_BSR.stride(),
        INT=tl.int64 if wide else tl.int32, UINT=tl.uint64 if wide else tl.uint32, BITS=64 if wide else 32, BLOCK=block,
        num_warps=min(32, max(4, block // 256)))
    return owner_BS, positions_RBK
