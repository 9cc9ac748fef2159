"""The whole model with the Triton kernels in place: the same function as with torch's."""

from dataclasses import replace

import pytest
import torch

from megatron_xmod.config.schema import ModelConfig, RoutingConfig
from megatron_xmod.kernels.registry import TORCH, load
from megatron_xmod.model.build import Transformer
from megatron_xmod.model.context import ModelContext

MODEL = ModelConfig(hidden_size=12, ffn_size=20, heads=2, kv_heads=1, head_dim=6, vocab_size=29, vocab_multiple=8,
                    active_layers=3, prefix_layers=1, init_std=0.3, routing=RoutingConfig(K=4, A=1, loss_coefficient=1))
OURS = {**TORCH, **dict.fromkeys(("rms_norm", "gather_norm", "scatter_add", "select"), "triton")}


def run(config, mode, device, names, recompute):
    """Logits and the gradients of all parameters."""
    context = ModelContext(config, routing=mode, recompute=recompute, kernels=load(names))
    model = Transformer(context, seed=0).to(device, torch.float64)
    tokens = torch.randint(29, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    logits = model(tokens)
    logits.square().mean().backward()
    return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("routing, mode, recompute", [
    ({"mode": "exclusive"}, "top_k", True), ({"mode": "exclusive", "one_by_one": True}, "threshold", False),
    ({"gate": "ffn", "residual_scale": False}, "top_k", False)], ids=["exclusive", "one by one", "soft, gate on ffn"])
def test_equals_torch(device, routing, mode, recompute):
    config = replace(MODEL, routing=replace(MODEL.routing, **routing))
    ours, theirs = (run(config, mode, device, names, recompute) for names in (OURS, TORCH))
    assert len(ours) == len(theirs) > 20
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
