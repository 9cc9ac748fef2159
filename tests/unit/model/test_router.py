"""Selection, gather and scatter, the routing loss: pure functions, against lists and loops."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_xmod.kernels.reference import add_gated
from megatron_xmod.model.router import (
    Selection,
    attach_loss,
    flat_positions,
    router_logits,
    routing_loss,
    select_threshold,
    select_top_k,
    selection_mask,
)
from tests.unit.model.toy import bits


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 5, 24])
def test_top_k_breaks_ties_towards_the_earlier_token(count):
    # Five distinct values in 24 tokens: nearly every cut falls among equals.
    score_BS = torch.randint(-2, 3, (6, 24), generator=torch.Generator().manual_seed(0)).float()
    selection = select_top_k(score_BS, count)
    assert selection.valid_BK is None
    for row, positions in zip(score_BS.tolist(), selection.positions_BK.tolist(), strict=True):
        ranking = sorted(range(24), key=lambda t: (-row[t], t))
        assert positions == sorted(ranking[:count])


def test_all_equal_scores_take_the_first_tokens():
    for length in (16, 2048):  # sorts of small and large inputs are different algorithms
        selection = select_top_k(torch.zeros(2, length), length // 4)
        assert selection.positions_BK.tolist() == [list(range(length // 4))] * 2


def test_top_k_ranks_logits_where_sigmoids_are_all_one():
    score_BS = torch.tensor([[40.0, 90.0, 50.0, 80.0, 60.0, 70.0]])
    assert (score_BS.sigmoid() == 1).all()
    assert select_top_k(score_BS, 2).positions_BK.tolist() == [[1, 3]]
    assert select_top_k(-score_BS, 2).positions_BK.tolist() == [[0, 2]]


def test_threshold_takes_probabilities_of_one_half_and_more():
    score_BS = random(5, 40).round(decimals=1)
    score_BS[0] = -1.0
    score_BS[1] = 0.0
    score_BS[2, :3] = torch.tensor([-0.0, -1e-9, 1e-300])
    selection = select_threshold(score_BS)
    entered = [[t for t, s in enumerate(row) if s >= 0] for row in score_BS.tolist()]
    assert entered[0] == [] and entered[1] == list(range(40)) and entered[2][:2] == [0, 2]
    assert selection.positions_BK.shape[1] == 40
    for row, positions, valid in zip(entered, selection.positions_BK.tolist(), selection.valid_BK.tolist(),
                                     strict=True):
        assert valid == [True] * len(row) + [False] * (40 - len(row))
        assert positions[:len(row)] == row
        assert len(set(positions)) == len(positions), "a filler stands in a selected token's place"


@pytest.mark.parametrize("score", [-1.0, 1.0])
def test_threshold_without_padding(score):
    selection = select_threshold(torch.full((3, 7), score))
    assert selection.positions_BK.shape == (3, 7 if score > 0 else 0)
    assert selection.valid_BK is None
    assert selection_mask(selection, 7).all() == (score > 0)


def test_selection_carries_no_gradient():
    score_BS = random(2, 8).requires_grad_()
    assert not select_top_k(score_BS, 2).positions_BK.requires_grad
    assert not select_threshold(score_BS).positions_BK.requires_grad


def test_mask_gather_and_add():
    selection = Selection(torch.tensor([[1, 4, 0], [0, 2, 5]]), torch.tensor([[True, True, False], [True, True, True]]))
    assert selection_mask(selection, 6).tolist() == [[False, True, False, False, True, False],
                                                     [True, False, True, False, False, True]]
    x_BSD, delta_BKD = random(2, 6, 3), random(2, 3, 3, seed=1)
    x_BSD[0, 0] = -0.0
    before = x_BSD.clone()
    index, valid_BK = flat_positions(selection, 6), selection.valid_BK
    gathered = x_BSD.flatten(0, 1)[index]
    out = add_gated(x_BSD.flatten(0, 1), index[valid_BK], delta_BKD[valid_BK]).view_as(x_BSD)
    assert torch.equal(bits(x_BSD), bits(before)), "the input was written to"
    expected = before.clone()
    for b, row in enumerate(selection.positions_BK.tolist()):
        for k, t in enumerate(row):
            assert torch.equal(gathered[b, k], x_BSD[b, t])
            if selection.valid_BK[b, k]:
                expected[b, t] = x_BSD[b, t] + delta_BKD[b, k]
    assert torch.equal(bits(out), bits(expected))


def test_logits():
    x_BSD, weight_D, bias = random(2, 5, 4), random(4, seed=1), torch.tensor(0.7, dtype=torch.float64)
    logits = router_logits(x_BSD, weight_D, bias)
    bare = router_logits(x_BSD, weight_D, None)
    for b in range(2):
        for t in range(5):
            s = sum(w * x for w, x in zip(weight_D.tolist(), x_BSD[b, t].tolist(), strict=True))
            assert bare[b, t].item() == pytest.approx(s, abs=1e-14)
            assert logits[b, t].item() == pytest.approx(s + 0.7, abs=1e-14)


@pytest.mark.parametrize("select", [select_threshold, lambda score_BS: select_top_k(score_BS, 3)])
def test_routing_loss_is_the_mean_cross_entropy(select):
    score_BS = random(3, 12) - 0.8
    score_BS[2] = -score_BS[2].abs() - 0.1
    score_BS[:2, 0] = torch.tensor([300.0, -300.0])  # stable: finite where the sigmoid is 0 or 1
    selection = select(score_BS)
    taken = [set(p[:v]) for p, v in zip(
        selection.positions_BK.tolist(),
        (selection.positions_BK >= 0).sum(1) if selection.valid_BK is None else selection.valid_BK.sum(1),
        strict=True)]
    losses = []
    for row, chosen in zip(score_BS.tolist(), taken, strict=True):
        for t, s in enumerate(row):
            signed = -s if t in chosen else s
            losses.append(signed if signed > 50 else math.log1p(math.exp(signed)))
    assert routing_loss(score_BS, selection).item() == pytest.approx(sum(losses) / 36, abs=1e-14)


def test_attached_loss_leaves_values_alone_and_gets_its_scale():
    x, w = random(3, 4).requires_grad_(), random(4, seed=1).requires_grad_()
    out = attach_loss(x, (w**2).sum(), 0.25)
    assert torch.equal(bits(out), bits(x))
    (7 * out).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 7.0)), "the main gradient changed"
    assert torch.allclose(w.grad, 0.25 * 2 * w, rtol=1e-15)


def test_unused_activation_brings_no_gradient():
    x, w = random(3).requires_grad_(), random(4).requires_grad_()
    attach_loss(x, w.sum(), 1.0)
    x.sum().backward()
    assert w.grad is None
