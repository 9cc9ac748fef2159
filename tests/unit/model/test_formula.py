"""The whole model against the paper's equations written out token by token: outputs, counts, every gradient."""

from __future__ import annotations

import pytest
import torch

from tests.unit.model.reference import SlowModel
from tests.unit.model.toy import DENSE, MOD, TOY, distance, make_context, make_model, make_tokens

# (K, A, active layers, prefix) -> sequence length and the groups that eq. 17-23 give, worked out by hand.
LAYOUTS = {
    "rounds 2 | 4,2": ((4, 1.5, 5, 1), 12, (2, 6)),
    "rounds 2 | 2": ((4, 0.5, 4, 1), 12, (2, 2)),
    "rounds 3,3": ((3, 2.0, 3, 0), 12, (6,)),
    "rounds 2,2 | 2,2": ((2, 2.0, 7, 1), 8, (4, 4)),
    "every token": ((1, 1.0, 3, 1), 6, (1,)),
}
VARIANTS = {
    "scale+bias": dict(residual_scale=True, router_bias=True),
    "scale": dict(residual_scale=True, router_bias=False),
    "bias": dict(residual_scale=False, router_bias=True),
    "plain": dict(residual_scale=False, router_bias=False),
    "ffn+bias": dict(gate="ffn", residual_scale=False, router_bias=True),
    "ffn": dict(gate="ffn", residual_scale=False, router_bias=False),
}
CASES = [(LAYOUTS["rounds 2 | 4,2"], variant) for variant in VARIANTS] \
    + [(layout, "scale+bias") for layout in LAYOUTS.values()]


def check(context, length: int, groups: tuple[int, ...], auxiliary_scale: float = 1.0, main_weight: float = 1.0):
    """Model against SlowModel. The loss is a random sum of the logits, plus what the layers attach."""
    context.auxiliary_scale = auxiliary_scale
    model = make_model(context)
    tokens = make_tokens(context, 2, length)
    counts = []
    for module in model.modules():
        if type(module).__name__ == "SparseRound":
            module.register_forward_hook(lambda module, inputs, output: counts.append(output[1]))
    logits = model(tokens)
    pull = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(1))
    (main_weight * (logits * pull).sum()).backward()

    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    slow = SlowModel(parameters, context.config, context.plan.prefix_layers, groups, context.routing == "threshold")
    slow_logits = slow(tokens)
    coefficient = context.config.routing.loss_coefficient * auxiliary_scale
    (main_weight * (slow_logits * pull).sum() + coefficient * slow.routing_loss).backward()

    assert distance(logits, slow_logits) < 1e-12
    ends = [end for size in groups for end in range(1, size + 1) if end % context.config.routing.K == 0 or end == size]
    starts = [sum(groups[:i]) for i, size in enumerate(groups) for end in range(1, size + 1)
              if end % context.config.routing.K == 0 or end == size]
    assert [c.tolist() for c in counts] == [slow.counts[s + e - 1] for s, e in zip(starts, ends, strict=True)]
    for name, parameter in model.named_parameters():
        expected = parameters[name].grad
        if expected is None or not expected.any():
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert distance(parameter.grad, expected) < 1e-10, name
    return {name: p.grad for name, p in model.named_parameters()}, slow


@pytest.mark.parametrize("mode", ["top_k", "threshold"])
@pytest.mark.parametrize(("layout", "variant"), CASES, ids=lambda v: v if isinstance(v, str) else f"K{v[0][0]}-{v[2]}")
def test_xmod(layout, variant, mode):
    (K, A, active, prefix), length, groups = layout
    context = make_context(TOY, mode=mode, model=dict(active_layers=active, prefix_layers=prefix), K=K, A=A,
                           **VARIANTS[variant])
    gradients, slow = check(context, length, groups)
    if mode == "top_k":
        assert all(g is not None and g.any() for g in gradients.values())
        assert sum(map(sum, slow.counts[-1])) == groups[-1] * 2 * (length // K)


@pytest.mark.parametrize("mode", ["top_k", "threshold"])
@pytest.mark.parametrize("gate", ["ffn", "residual"])
def test_mod(gate, mode):
    check(make_context(MOD, mode=mode, gate=gate), 12, (1, 1, 1, 1))


def test_dense():
    check(make_context(DENSE), 8, ())


def test_strong_bias_spreads_the_tokens():
    # Stronger than any logit: 4 layers with 1/4 of the tokens each reach every token once.
    _, slow = check(make_context(TOY, bias_scale=100.0), 12, (2, 6))
    assert slow.counts[2 + 3] == [[1] * 12, [1] * 12]


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_attached_routing_loss_is_the_explicit_sum(scale):
    """With a main loss of weight 0 only the routing losses are left, however the main gradient is scaled."""
    gradients, slow = check(make_context(TOY), 12, (2, 6), auxiliary_scale=scale, main_weight=0.0)
    assert slow.routing_loss > 1.0
    assert gradients["layers.2.rounds.0.router.weight"].any()
    assert not gradients["layers.5.weight"].any(), "the head has no part in routing"


def test_no_coefficient_no_routing_gradient():
    gradients, _ = check(make_context(TOY, loss_coefficient=0.0), 12, (2, 6), main_weight=0.0)
    assert not any(g.any() for g in gradients.values())
