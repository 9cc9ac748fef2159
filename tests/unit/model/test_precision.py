"""A bf16 model routes in fp32. Tiny sizes: bf16 products are slow on CPUs."""

from __future__ import annotations

import pytest
import torch

from megatron_xmod.model import sparse
from megatron_xmod.model.block import attention_update, mlp_update
from megatron_xmod.model.router import attach_loss, router_logits
from megatron_xmod.model.sparse import SparseRound
from megatron_xmod.parallel.loss import cross_entropy
from tests.unit.model.toy import bits, make_context, make_hidden, make_model, make_tokens, scramble

bf16 = torch.bfloat16


def test_logits_tell_apart_what_bf16_would_round_together():
    x_BSD = torch.tensor([[[256.0, 0.0], [256.0, 0.25], [256.0, 0.5], [256.0, -0.25]]], dtype=bf16)
    logits = router_logits(x_BSD, torch.ones(2, dtype=bf16), torch.tensor(0.125, dtype=bf16))
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[256.125, 256.375, 256.625, 255.875]]
    assert logits.to(bf16).unique().numel() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_routing_is_in_the_models_own_precision_above_bf16(dtype):
    assert router_logits(torch.ones(1, 2, 3, dtype=dtype), torch.ones(3, dtype=dtype), None).dtype == dtype


def test_round_selects_and_counts_in_fp32():
    context = make_context(K=4, A=1.0, model=dict(hidden_size=2))
    layers = scramble(SparseRound(context, 1)).to(bf16)
    with torch.no_grad():
        layers.router.weight.fill_(1.0)
    x_BSD = torch.full((1, 8, 2), 256.0, dtype=bf16)
    x_BSD[0, :, 1] = torch.tensor([0.0, 0.1, 0.5, 0.2, 0.0, 0.25, 0.6, 0.3])
    _, taken_BS = layers(x_BSD, torch.zeros(1, 8))
    assert taken_BS.dtype == torch.float32
    assert taken_BS[0].nonzero().flatten().tolist() == [2, 6]


@pytest.mark.parametrize("gate", [dict(gate="residual"), dict(gate="ffn", residual_scale=False)],
                         ids=lambda g: g["gate"])
def test_gate_multiplies_in_fp32(gate):
    """Bit for bit: sigmoid and product in fp32, one rounding to bf16."""
    context = make_context(K=1, A=1.0, **gate)
    layer = scramble(SparseRound(context, 1)).to(bf16)
    x_BSD = make_hidden(context, 2, 6, bf16)
    out, _ = layer(x_BSD, torch.zeros(2, 6))
    weights, (weight_D, bias, scale) = layer.block.unbind()[0], layer.router.unbind()[0]
    angles = context.rope(torch.arange(6).unsqueeze(0), 6, bf16)
    a = attention_update(context.norm(x_BSD, weights.attention_norm), weights, angles, context)
    f = mlp_update(context.norm(x_BSD + a, weights.mlp_norm), weights, context)
    r = torch.sigmoid(x_BSD.float() @ weight_D.float() + bias.float()).unsqueeze(-1)
    if scale is None:
        expected = x_BSD + (a + (r * f.float()).to(bf16))
    else:
        expected = x_BSD + (scale.float() * r * (a + f).float()).to(bf16)
    assert torch.equal(bits(out), bits(expected))
    assert not torch.equal(r.to(bf16).float(), r), "the gates are exact in bf16: the test could not fail"


@pytest.mark.parametrize("recompute", [False, True])
def test_training_and_causal_evaluation_are_finite(monkeypatch, recompute):
    scores = []
    monkeypatch.setattr(sparse, "router_logits", lambda *args: scores.append(router_logits(*args)) or scores[-1])
    context = make_context()
    context.recompute = recompute
    model, tokens = make_model(context, bf16), make_tokens(context, 1, 16)
    counts = []
    for group in model.layers[2:4]:
        group.rounds[0].register_forward_pre_hook(lambda module, inputs: counts.append(inputs[1].dtype))
    logits = model(tokens)
    loss = cross_entropy(logits, tokens, context.config.vocab_size, context.mesh)
    assert (logits.dtype, loss.dtype) == (bf16, torch.float32)
    loss.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == bf16 and parameter.grad.isfinite().all() and parameter.grad.any(), name
    context.routing = "threshold"
    with torch.no_grad():
        assert model(tokens).isfinite().all()
    assert len(scores) >= 2 * 8 and {s.dtype for s in scores} == {torch.float32}
    # bf16 would count to 256 only.
    assert len(counts) >= 2 * 2 and set(counts) == {torch.float32}


def test_attached_loss_keeps_its_scale_in_bf16():
    x, w = torch.ones(2, dtype=torch.bfloat16, requires_grad=True), torch.ones((), requires_grad=True)
    attach_loss(x, w * 3, 1 / 3).sum().backward()
    assert w.grad.item() == pytest.approx(1.0, rel=1e-6)
