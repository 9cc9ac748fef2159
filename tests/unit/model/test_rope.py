"""Rotary position against complex numbers, and to full precision far out."""

from __future__ import annotations

import pytest
import torch

from megatron_xmod.model.rope import Rope, rotate
from tests.unit.model.reference import turn

THETA = 500.0


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("E", [2, 8, 16])
def test_is_a_turn_of_complex_numbers(E):
    positions_BS = torch.tensor([[0, 1, 2, 7], [3, 5, 40, 63]])
    x_BSHE = random(2, 4, 3, E)
    turned = rotate(x_BSHE, *Rope(E, THETA)(positions_BS, 64, torch.float64))
    for b in range(2):
        for i, position in enumerate(positions_BS[b].tolist()):
            assert torch.allclose(turned[b, i], turn(x_BSHE[b, i], position, THETA), rtol=0, atol=1e-13)


def test_scores_depend_on_the_distance_only():
    rope, q, k = Rope(8, THETA), random(8), random(8).flip(0)

    def score(i, j):
        cos, sin = rope(torch.tensor([[i, j]]), 101, torch.float64)
        return (rotate(q.view(1, 1, 1, 8), cos[:, :1], sin[:, :1])
                * rotate(k.view(1, 1, 1, 8), cos[:, 1:], sin[:, 1:])).sum().item()

    assert score(5, 3) == pytest.approx(score(100, 98), abs=1e-12)
    assert abs(score(5, 3) - score(5, 4)) > 1e-2
    assert abs(score(5, 3) - score(3, 5)) > 1e-2


def test_one_row_of_positions_serves_the_batch():
    angles = Rope(4, THETA)(torch.arange(6).unsqueeze(0), 6, torch.float64)
    x_BSHE = random(3, 6, 2, 4)
    one_by_one = torch.cat([rotate(x_BSHE[b:b + 1], *angles) for b in range(3)])
    assert torch.equal(rotate(x_BSHE, *angles), one_by_one)


def test_far_positions_keep_fp32_precision():
    # Angles made in fp32 would be off by 1e-3 here.
    positions = torch.tensor([131071, 130000])
    cos, sin = Rope(64, 1e6)(positions, 131072, torch.float32)
    angles = positions.double().unsqueeze(-1) * 1e6 ** (-torch.arange(32, dtype=torch.float64) / 32)
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos - angles.cos()).abs().max() < 1e-7
    assert (sin - angles.sin()).abs().max() < 1e-7


def test_table_grows_and_serves_several_dtypes():
    rope = Rope(8, THETA)
    short = rope(torch.arange(4), 4, torch.float32)
    double = rope(torch.arange(4), 4, torch.float64)
    grown = rope(torch.arange(50), 50, torch.float32)
    assert torch.equal(short[0], grown[0][:4]) and torch.equal(short[1], grown[1][:4])
    assert torch.equal(double[0].float(), short[0]) and double[0].dtype == torch.float64
    assert torch.equal(rope(torch.tensor([3]), 4, torch.float32)[0], short[0][3:])


def test_table_made_for_inference_serves_training():
    rope = Rope(8, THETA)
    with torch.inference_mode():
        rope(torch.arange(4), 4, torch.float64)
    x_BSHE = random(1, 4, 2, 8).requires_grad_()
    rotate(x_BSHE, *rope(torch.arange(4).unsqueeze(0), 4, torch.float64)).sum().backward()
    assert x_BSHE.grad.abs().min() > 0
