"""A round of sparse layers: what it takes, what it leaves alone, how it meets the dense block, recomputation."""

from __future__ import annotations

import pytest
import torch

from megatron_xmod.model import sparse
from megatron_xmod.model.block import Block, attention_update, mlp_update
from megatron_xmod.model.sparse import AnchorGroup, SparseRound
from megatron_xmod.model.statistics import GroupStatistics
from tests.unit.model.toy import bits, distance, make_context, make_hidden, make_model, make_tokens, scramble

GATES = [dict(gate="residual"), dict(gate="ffn", residual_scale=False)]
gates = pytest.mark.parametrize("gate", GATES, ids=lambda g: g["gate"])
modes = pytest.mark.parametrize("mode", ["top_k", "threshold"])
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def nobody_taken(x_BSD):
    return torch.zeros(x_BSD.shape[:2], dtype=torch.promote_types(x_BSD.dtype, torch.float32))


def open_round(context, dtype):
    """One layer that takes every token with a gate of exactly 1, and a dense block with the same weights."""
    layer, dense = scramble(SparseRound(context, 1)), Block(context)
    with torch.no_grad():
        layer.router.bias.fill_(1e4)
        if layer.router.scale is not None:
            layer.router.scale.fill_(1.0)
        for name, value in layer.block.unbind()[0]._asdict().items():
            getattr(dense, name).copy_(value)
    return layer.to(dtype), dense.to(dtype)


@gates
@modes
@dtypes
def test_layer_on_all_tokens_with_gate_one_has_the_updates_of_the_dense_block(gate, mode, dtype):
    """Bit for bit. Only the order of the last sum differs: x + (a + f) here, (x + a) + f in the dense block."""
    context = make_context(mode=mode, K=1, A=1.0, **gate)
    layer, dense = open_round(context, dtype)
    x_BSD = make_hidden(context, 2, 9, dtype)
    out, taken_BS = layer(x_BSD, nobody_taken(x_BSD))
    assert (taken_BS == 1).all()

    angles = context.rope(torch.arange(9).unsqueeze(0), 9, dtype)
    a = attention_update(context.norm(x_BSD, dense.attention_norm), dense.weights(), angles, context)
    f = mlp_update(context.norm(x_BSD + a, dense.mlp_norm), dense.weights(), context)
    assert torch.equal(bits(dense(x_BSD)), bits((x_BSD + a) + f))
    assert torch.equal(bits(out), bits(x_BSD + (a + f)))
    # Two roundings each, so a few units in the last place of the largest term apart at most.
    largest = torch.stack((x_BSD, a, f)).abs().amax(0)
    assert ((out - dense(x_BSD)).abs() <= 3 * torch.finfo(dtype).eps * largest).all()


@gates
def test_layer_on_all_tokens_with_gate_one_has_the_gradients_of_the_dense_block(gate):
    context = make_context(K=1, A=1.0, loss_coefficient=0.0, **gate)
    layer, dense = open_round(context, torch.float64)
    inputs = [make_hidden(context, 2, 9).requires_grad_() for _ in range(2)]
    pull = make_hidden(context, 2, 9, seed=1)
    (layer(inputs[0], nobody_taken(inputs[0]))[0] * pull).sum().backward()
    (dense(inputs[1]) * pull).sum().backward()
    assert distance(inputs[0].grad, inputs[1].grad) < 1e-13
    for name, parameter in dense.named_parameters():
        assert distance(getattr(layer.block, name).grad[0], parameter.grad) < 1e-13, name


@gates
@modes
@dtypes
@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_outside_keep_their_bits(gate, mode, dtype, recompute):
    context = make_context(mode=mode, bias_scale=0.5, **gate)
    context.recompute = recompute
    layers = scramble(SparseRound(context, 2)).to(dtype)
    with torch.no_grad():
        layers.router.bias -= 1.0  # so that the threshold, too, leaves some out
    x_BSD = make_hidden(context, 4, 16, dtype)
    x_BSD[:, ::2, ::3] = -0.0
    before = x_BSD.clone()
    out, taken_BS = layers(x_BSD, nobody_taken(x_BSD))
    outside = taken_BS == 0
    assert 0.1 < outside.float().mean() < 0.9
    assert torch.equal(bits(out)[outside], bits(before)[outside])
    assert (out != before).any(-1)[~outside].all(), "a token that entered was not updated"
    assert torch.equal(bits(x_BSD), bits(before)), "the input was written to"


def watch_selections(monkeypatch):
    """The (scores, mask) of each top-k selection from now on."""
    seen = []

    def watched(score_BS, count, kernel, select=sparse.select_top_k):
        selection = select(score_BS, count, kernel)
        seen.append((score_BS, selection))
        return selection

    monkeypatch.setattr(sparse, "select_top_k", watched)
    return seen


def only_bias(module):
    """Logits that are the same for all tokens, so that b alone decides."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("router.weight"):
                parameter.zero_()


@pytest.mark.parametrize("bias_scale", [0.0, 0.5])
def test_bias_counts_selections_and_starts_again_after_each_anchor(monkeypatch, bias_scale):
    """With equal logits the bias sends each layer to the next quarter of the sequence; without it, all to the first."""
    context = make_context(bias_scale=bias_scale)  # groups of 2 and 6 layers: rounds of 2 | 4 and 2
    model = make_model(context)
    only_bias(model)
    seen = watch_selections(monkeypatch)
    model(make_tokens(context, 2, 16))
    quarters = [0, 1] + [0, 1, 2, 3, 0, 1] if bias_scale else [0] * 8
    assert [s.positions_BK.tolist() for _, s in seen] == [[list(range(4 * q, 4 * q + 4))] * 2 for q in quarters]
    # Lowered by exactly bias_scale for each earlier selection.
    spread = [(score_BS.amax() - score_BS.amin()).item() for score_BS, _ in seen]
    earlier = [0, 1, 0, 1, 1, 1, 0, 1] if bias_scale else [0] * 8
    assert spread == pytest.approx([n * bias_scale for n in earlier], abs=1e-14)


@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_each_layer_takes_exactly_its_share(monkeypatch, K):
    context = make_context(K=K, A=1.0, model=dict(active_layers=4, prefix_layers=0))
    seen = watch_selections(monkeypatch)
    make_model(context)(make_tokens(context, 3, 32))
    assert len(seen) == context.plan.sparse_layers
    for _, selection in seen:
        assert selection.positions_BK.shape == (3, 32 // K)
        assert (selection.positions_BK.diff() > 0).all(), "not ascending, or a token twice"


def test_layer_ranks_logits_and_not_gates():
    """All gates are 1 in fp32 and fp64; the largest logits stand last."""
    context = make_context()
    layer = scramble(SparseRound(context, 1)).double()
    x_BSD = make_hidden(context, 1, 16)
    x_BSD[..., 0] = torch.arange(16)
    with torch.no_grad():
        layer.router.weight.zero_()[0, 0] = 1.0
        layer.router.bias.fill_(50.0)
    _, taken_BS = layer(x_BSD, nobody_taken(x_BSD))
    assert taken_BS[0].nonzero().flatten().tolist() == [12, 13, 14, 15]


@gates
@modes
def test_recomputation_gives_the_same_bits_and_never_selects_again(monkeypatch, gate, mode):
    calls = []
    name = {"top_k": "select_top_k", "threshold": "select_threshold"}[mode]
    select = getattr(sparse, name)
    monkeypatch.setattr(sparse, name, lambda *args: calls.append("select") or select(*args))
    record = GroupStatistics.record_soft
    monkeypatch.setattr(GroupStatistics, "record_soft", lambda *args: calls.append("record") or record(*args))
    results, context = [], make_context(mode=mode, **gate)
    tokens = make_tokens(context, 2, 16)
    for context.recompute in (False, True):
        calls.clear()
        context.statistics = {}
        model = make_model(context, torch.float32)
        logits = model(tokens)
        assert calls == ["select", "record"] * 8
        logits.square().sum().backward()
        assert len(calls) == 16, "backward routed or recorded again"
        assert [len(figures["selected"]) for (figures,) in context.statistics.values()] == [2, 6]
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_recomputation_keeps_less():
    """Otherwise the test above compares a thing with itself: bytes that autograd holds after the forward."""
    context, held = make_context(), []
    model = make_model(context, torch.float32)
    for context.recompute in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.nbytes) or t, lambda t: t):
            model(make_tokens(context, 2, 16))
        held.append(sum(saved))
    assert held[1] < held[0] / 2


def test_group_is_its_rounds_and_then_its_anchor():
    context = make_context()
    group = scramble(AnchorGroup(context, (4, 2), "group")).double()
    x_BSD = make_hidden(context, 2, 16)
    out = group(x_BSD)
    taken_BS = nobody_taken(x_BSD)
    for sparse_round in group.rounds:
        x_BSD, taken_BS = sparse_round(x_BSD, taken_BS)
    assert taken_BS.sum() == 2 * 6 * 4
    assert torch.equal(out, group.anchor(x_BSD))
