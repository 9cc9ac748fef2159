"""One model class for all variants, and its initial values."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_xmod.config.schema import RoutingConfig
from megatron_xmod.flops import stored_params
from megatron_xmod.model.block import Block
from megatron_xmod.model.build import FinalNorm, Head, Transformer, build_layer, layer_count
from megatron_xmod.model.context import ModelContext
from megatron_xmod.model.router import Router
from megatron_xmod.model.sparse import AnchorGroup, SparseRound
from megatron_xmod.parallel.mesh import Mesh
from megatron_xmod.parallel.tensor import VocabEmbedding
from tests.unit.model.toy import DENSE, MOD, TOY, make_context, make_tokens

VARIANTS = {"dense": DENSE, "mod": MOD, "xmod": TOY}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


@variants
def test_all_variants_are_one_class(config):
    model = Transformer(ModelContext(config))
    assert {type(module) for module in model.modules()} - {AnchorGroup, SparseRound, Router} \
        == {Transformer, nn.ModuleList, VocabEmbedding, Block, FinalNorm, Head}
    groups = [layer for layer in model.layers if isinstance(layer, AnchorGroup)]
    assert len(groups) == len(model.context.plan.groups)
    assert bool(groups) == (config is not DENSE)
    for group, size in zip(groups, model.context.plan.groups, strict=True):
        assert type(group.anchor) is Block
        assert sum(len(r.router.weight) for r in group.rounds) == size


@variants
def test_every_parameter_is_counted(config):
    assert sum(p.numel() for p in Transformer(ModelContext(config)).parameters()) == stored_params(config)


def test_dense_has_no_groups():
    for config in (DENSE, replace(TOY, prefix_layers=TOY.active_layers)):
        context = ModelContext(config)
        assert (context.plan.groups, context.plan.sparse_layers) == ((), 0)
        assert [type(layer) for layer in Transformer(context).layers] \
            == [VocabEmbedding] + [Block] * 5 + [FinalNorm, Head]


def test_mod_is_single_sparse_layers_before_anchors():
    context = ModelContext(MOD)
    assert context.plan.groups == (1, 1, 1, 1)
    names = [name for name, _ in Transformer(context).named_parameters()]
    assert not any("router.bias" in name or "router.scale" in name for name in names)


@variants
def test_layers_are_the_same_built_alone(config):
    """A pipeline stage builds only its own layers, on a process with another history of random numbers."""
    context = ModelContext(config)
    whole = Transformer(context, seed=3)
    torch.manual_seed(12345)
    state = torch.get_rng_state()
    for index in reversed(range(layer_count(context))):
        for name, parameter in build_layer(context, index, seed=3).named_parameters():
            assert torch.equal(parameter, whole.layers[index].get_parameter(name)), name
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


@pytest.mark.parametrize("tensor_size", [2, 4])
def test_shards_together_are_the_whole(tensor_size):
    config = replace(TOY, kv_heads=4)
    whole = Transformer(ModelContext(config), seed=1)
    # A mesh that says where the rank stands; without a group nothing is communicated.
    shards = [dict(Transformer(ModelContext(config, Mesh(tensor_size=tensor_size, rank=rank)), seed=1)
                   .named_parameters()) for rank in range(tensor_size)]
    sharded = set()
    for name, parameter in whole.named_parameters():
        parts = [shard[name] for shard in shards]
        dim = parameter.tensor_parallel_dim
        if dim is None:
            assert all(torch.equal(part, parameter) for part in parts), name
        else:
            sharded.add(name.rsplit(".", 1)[1])
            assert all(part.shape[dim] * tensor_size == parameter.shape[dim] for part in parts)
            assert torch.equal(torch.cat(parts, dim), parameter), name
            assert all(part.tensor_model_parallel for part in parts)
        assert all(part.full_shape == parameter.shape for part in parts)
    assert sharded == {"weight", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_values_depend_on_seed_and_name():
    def values(seed):
        return {name: p.detach() for name, p in Transformer(make_context(), seed).named_parameters() if p.init_std}

    first, again, other = values(0), values(0), values(1)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert not torch.equal(value, other[name]), name
    # No two matrices start alike, neither of two layers nor of one stack.
    matrices = [m.flatten()[:8] for value in first.values() for m in value.reshape(-1, *value.shape[-2:])]
    assert len(torch.stack(matrices).unique(dim=0)) == len(matrices) > 50


def test_values_are_those_of_the_first_version():
    """Another value means that every published seed now gives another model."""
    parameters = dict(Transformer(make_context(), seed=7).named_parameters())
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(b"7/3.rounds.0.block.q_proj").digest()[:7], "little"))
    expected = torch.empty(4, 32, 16).normal_(0.0, 0.3, generator=generator)
    assert torch.equal(parameters["layers.3.rounds.0.block.q_proj"], expected)


def test_standard_deviations():
    """Outputs into the residual stream scale with the layers that a token passes (6), not with those stored (36)."""
    config = replace(TOY, hidden_size=64, ffn_size=96, vocab_size=512, init_std=0.02, active_layers=6, prefix_layers=0,
                     routing=RoutingConfig(K=8, A=5.0, residual_scale_init=1.5))
    context = ModelContext(config)
    assert context.plan.layers == 41
    seen = set()
    for name, parameter in Transformer(context).named_parameters():
        kind = name.rsplit(".", 1)[1]
        seen.add(kind)
        if kind in ("o_proj", "down_proj"):
            expected = 0.02 / math.sqrt(2 * 6)
        elif kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") or \
                kind == "weight" and parameter.dim() == 2:
            expected = 0.02
        else:
            value = {"scale": 1.5, "bias": 0.0}.get(kind, 1.0)
            assert (parameter == value).all(), name
            continue
        tolerance = 5 / math.sqrt(2 * parameter.numel())  # five standard errors
        assert parameter.std().item() == pytest.approx(expected, rel=tolerance), name
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name
    assert {"scale", "bias", "attention_norm", "q_norm", "mlp_norm", "weight", "q_proj", "up_proj"} <= seen


def gradient_norm(config, length=64) -> tuple[float, float]:
    """Of the mean cross-entropy at initialisation, and the root mean square of the residual stream at its end."""
    context = ModelContext(config)
    model, stream = Transformer(context), []
    model.layers[-2].register_forward_hook(lambda module, inputs, output: stream.append(inputs[0]))
    tokens = make_tokens(context, 4, length + 1)
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), \
        stream[0].square().mean().sqrt().item()


@pytest.mark.parametrize(("K", "A"), [(8, 4.0), (16, 3.0)])
def test_deep_model_starts_as_calm_as_the_dense_one(K, A):
    """Gradients and the residual stream of a model with many layers, few of them active, don't explode.

    Weights of 1/sqrt(width), so that a layer's update is as large as its input. Gates near 1/2 make sparse updates
    smaller than dense ones; seen are gradient norms of 0.67 and 0.76 times the dense model's, and streams of 0.81 and
    0.90 times.
    """
    base = replace(TOY, hidden_size=32, ffn_size=96, vocab_size=64, init_std=32**-0.5, active_layers=12,
                   prefix_layers=2, rope_theta=1e4, routing=RoutingConfig(K=K, A=A))
    dense_norm, dense_stream = gradient_norm(replace(base, prefix_layers=None))
    norm, stream = gradient_norm(base)
    assert ModelContext(base).plan.layers >= 68
    assert 0.5 < norm / dense_norm < 1.25
    assert 0.65 < stream / dense_stream < 1.25
