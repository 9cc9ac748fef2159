"""Decoding with caches against the full causal forward. A cache holds the tokens that entered its layer, no others."""

from __future__ import annotations

import pytest
import torch

from megatron_xmod.inference.cache import KVCache
from megatron_xmod.kernels.attention import sdpa
from megatron_xmod.model.block import Block
from megatron_xmod.model.sparse import SparseRound
from tests.unit.model.toy import DENSE, MOD, TOY, make_context, make_model, make_tokens

LENGTH = 24
VARIANTS = {
    "xmod": (TOY, {}),
    "xmod ffn": (TOY, dict(gate="ffn", residual_scale=False)),
    "xmod without bias": (TOY, dict(bias_scale=0.0, router_bias=False)),
    "mod": (MOD, {}),
    "dense": (DENSE, {}),
}
variants = pytest.mark.parametrize(("config", "routing"), VARIANTS.values(), ids=VARIANTS)
CHUNKS = {
    "one by one": [1] * LENGTH,
    "prompt, then one by one": [9] + [1] * (LENGTH - 9),
    "prompt in chunks": [5, 1, 7, 2, 1, 1, 7],
    "all at once": [LENGTH],
}


def decode(model, tokens, chunks: list[int], watch=None) -> tuple[torch.Tensor, KVCache]:
    """Logits [1, S, V] of a sequence given piece by piece."""
    assert sum(chunks) == tokens.shape[1]
    cache, logits = KVCache(), []
    with torch.no_grad():
        for chunk in tokens.split(chunks, dim=1):
            logits.append(model(chunk, cache))
            if watch:
                watch(cache)
    return torch.cat(logits, 1), cache


def full_forward(model, tokens) -> tuple[torch.Tensor, list[int]]:
    """Logits, and the threshold passes of each sparse layer in the model's order."""
    context = model.context
    context.statistics = {}
    with torch.no_grad():
        logits = model(tokens)
    passes = [round(share * tokens.shape[1]) for (figures,) in context.statistics.values()
              for share in figures["selected"].tolist()]
    context.statistics = None
    return logits, passes


def cached_tokens(model, cache) -> tuple[list[int], list[int]]:
    """Tokens in the caches of the dense layers, and of the sparse ones, in the model's order."""
    dense = [cache.layer(module, 0).tokens for module in model.modules()
             if isinstance(module, Block) and module.attention_norm.dim() == 1]
    sparse = [cache.layer(module, i).tokens for module in model.modules() if isinstance(module, SparseRound)
              for i in range(len(module.router.weight))]
    return dense, sparse


# In fp32 with milder weights: those of the toy model let rounding errors grow from layer to layer.
@pytest.mark.parametrize(("dtype", "init_std", "tolerance"), [(torch.float64, 0.3, 1e-12), (torch.float32, 0.15, 1e-5)],
                         ids=["fp64", "fp32"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@variants
def test_decoding_is_the_full_causal_forward(config, routing, chunks, dtype, init_std, tolerance):
    context = make_context(config, mode="threshold", model=dict(init_std=init_std), **routing)
    model, tokens = make_model(context, dtype), make_tokens(context, 1, LENGTH)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter *= 0.3 / init_std
    logits, passes = full_forward(model, tokens)
    decoded, cache = decode(model, tokens, chunks)
    assert (decoded - logits).abs().max() <= tolerance
    dense, sparse = cached_tokens(model, cache)
    assert sparse == passes
    assert dense == [LENGTH] * context.plan.dense_layers
    assert cache.executed_tokens() == sum(passes) + LENGTH * context.plan.dense_layers
    if passes:
        assert any(0 < n < LENGTH for n in passes), "no layer routes here"


def test_executed_tokens_grow_with_the_passes_of_each_step():
    context = make_context(mode="threshold")
    model, tokens = make_model(context), make_tokens(context, 1, LENGTH)
    executed = []
    decode(model, tokens, [1] * LENGTH, lambda cache: executed.append((cache.length, cache.executed_tokens())))
    for length, count in executed:
        _, passes = full_forward(model, tokens[:, :length])
        assert count == sum(passes) + length * context.plan.dense_layers


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_layers_that_no_token_enters(chunks):
    context = make_context(mode="threshold")
    model, tokens = make_model(context), make_tokens(context, 1, LENGTH)
    rounds = model.layers[3].rounds
    with torch.no_grad():
        rounds[0].router.bias[1:3] = -1e4
        rounds[1].router.bias[:] = -1e4
    logits, passes = full_forward(model, tokens)
    decoded, cache = decode(model, tokens, chunks)
    assert (decoded - logits).abs().max() <= 1e-12
    _, sparse = cached_tokens(model, cache)
    assert sparse == passes
    assert [n == 0 for n in sparse[2:]] == [False, True, True, False, True, True]


def test_layer_that_only_late_tokens_enter():
    """Its cache starts empty in the middle of the sequence; positions are those of the sequence."""
    context = make_context(mode="threshold")
    model, tokens = make_model(context), make_tokens(context, 1, LENGTH)
    first = model.layers[2].rounds[0]
    late = tokens[0, 15].item()
    tokens[0, :15] = tokens[0, :15].where(tokens[0, :15] != late, (late + 1) % context.config.vocab_size)
    with torch.no_grad():
        # The prefix layer is silenced: the first router sees the embedding, whose channel 0 marks one token.
        model.layers[1].o_proj.zero_()
        model.layers[1].down_proj.zero_()
        model.layers[0].weight[:, 0] = -1.0
        model.layers[0].weight[late, 0] = 1.0
        first.router.weight[0].zero_()[0] = 1e4
        first.router.bias.zero_()
    logits, passes = full_forward(model, tokens)
    decoded, cache = decode(model, tokens, [6] + [1] * (LENGTH - 6))
    assert (decoded - logits).abs().max() <= 1e-12
    assert cache.layer(first, 0).tokens == passes[0] == int((tokens == late).sum()) >= 1


def test_caches_hold_the_keys_and_values_of_the_tokens_that_entered():
    """Decoded one by one, the same as those that the full forward computes for its compacted sequences."""
    context = make_context(mode="threshold")
    model, tokens = make_model(context), make_tokens(context, 1, LENGTH)
    seen = []
    kernels = context.kernels
    context.kernels = kernels._replace(attention=lambda q, k, v: seen.append((k, v)) or sdpa(q, k, v))
    _, passes = full_forward(model, tokens)
    context.kernels = kernels
    _, cache = decode(model, tokens, [1] * LENGTH)
    caches = [cache.layer(model.layers[1], 0)]
    for group in model.layers[2:4]:
        caches += [cache.layer(sparse_round, i) for sparse_round in group.rounds
                   for i in range(len(sparse_round.router.weight))] + [cache.layer(group.anchor, 0)]
    used = [layer for layer in caches if layer.tokens]
    assert len(used) == len(seen) == context.plan.dense_layers + sum(n > 0 for n in passes)
    for layer, keys_and_values in zip(used, seen, strict=True):
        for buffer, expected in zip(layer._buffers, keys_and_values, strict=True):
            assert layer.tokens == expected.shape[1]
            assert (buffer[:, :layer.tokens] - expected).abs().max() <= 1e-12


def test_memory_follows_the_tokens_that_entered():
    """Sparse caches together cost what their tokens cost, up to the doubling of buffers."""
    context = make_context(mode="threshold", loss_coefficient=0.0)
    model, tokens = make_model(context), make_tokens(context, 1, LENGTH)
    with torch.no_grad():
        for group in model.layers[2:4]:
            for sparse_round in group.rounds:
                sparse_round.router.bias -= 1.5
    _, cache = decode(model, tokens, [1] * LENGTH)
    token_bytes = 2 * context.config.kv_heads * context.config.head_dim * 8
    assert cache.executed_tokens() * token_bytes <= cache.bytes() <= 2 * cache.executed_tokens() * token_bytes
    assert cache.executed_tokens() < 0.75 * LENGTH * context.plan.layers


def test_buffers_grow_by_doubling():
    """Appending T tokens one by one copies O(T) of them, not O(T^2)."""
    layer = KVCache().layer(torch.nn.Identity(), 0)
    capacities = set()
    expected = torch.arange(100.0).view(1, 100, 1, 1)
    for t in range(100):
        keys, values = layer.append(expected[:, t:t + 1], -expected[:, t:t + 1])
        capacities.add(layer._buffers[0].shape[1])
        assert torch.equal(keys, expected[:, :t + 1]) and torch.equal(values, -expected[:, :t + 1])
    assert sorted(capacities) == [1, 2, 4, 8, 16, 32, 64, 128]


def test_two_sequences_do_not_mix():
    context = make_context(mode="threshold")
    model = make_model(context)
    both = [make_tokens(context, 1, 12, seed) for seed in range(2)]
    caches, logits = [KVCache(), KVCache()], [[], []]
    with torch.no_grad():
        for t in range(12):
            for tokens, cache, out in zip(both, caches, logits, strict=True):
                out.append(model(tokens[:, t:t + 1], cache))
        for tokens, out in zip(both, logits, strict=True):
            assert (torch.cat(out, 1) - model(tokens)).abs().max() <= 1e-12


@pytest.mark.parametrize(("mode", "batch"), [("threshold", 2), ("top_k", 1)])
def test_cache_refuses_what_it_can_not_do(mode, batch):
    context = make_context(mode=mode)
    with torch.no_grad(), pytest.raises(ValueError, match="one sequence under threshold"):
        make_model(context)(make_tokens(context, batch, 8), KVCache())
