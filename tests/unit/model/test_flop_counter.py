"""The FLOPs of flops.py against torch's counter on the real modules, exactly.

The counter knows matrix products. Attention is therefore run with torch's MATH backend, which is two batched products
(`bmm`) of all queries with all keys: uncausal, as the paper counts. (CPU's fused kernel is not counted at all.) Key and
value heads shared by query heads (GQA) are repeated there, which costs no FLOPs. Matrix times vector (`mv`), which only
the routers use, is not counted unless asked for. The rest (norms, softmax, gates, gathers) neither side counts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_xmod.flops import flops_per_token_paper, layer_flops, layer_matrices, train_flops_per_token
from megatron_xmod.model.build import Transformer
from megatron_xmod.model.context import ModelContext
from tests.unit.model.toy import DENSE, MOD, TOY, make_tokens

LENGTH = 32
aten = torch.ops.aten
VARIANTS = {
    "dense": DENSE,
    "mod": MOD,
    "xmod": TOY,
    "xmod K8": replace(TOY, active_layers=6, prefix_layers=0, routing=replace(TOY.routing, K=8, A=2.0)),
    "all heads": replace(TOY, kv_heads=4),
    "heads wider than the model": replace(TOY, head_dim=12),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def count(config, batch=1, backward=False) -> tuple[Transformer, FlopCounterMode]:
    context = ModelContext(config)
    model = Transformer(context)
    routers = {aten.mv: lambda matrix, vector, **_: 2 * matrix[0] * matrix[1]}  # shapes
    counter = FlopCounterMode(display=False, custom_mapping=routers)
    with sdpa_kernel(SDPBackend.MATH), counter:
        logits = model(make_tokens(context, batch, LENGTH))
        if backward:
            logits.sum().backward()
    return model, counter


@variants
def test_paper_flops_are_the_products_of_the_blocks(config):
    model, counter = count(config)
    plan, total = model.context.plan, counter.get_flop_counts()["Global"]
    assert set(total) == {aten.mm, aten.bmm} | ({aten.mv} if plan.sparse_layers else set())
    head = 2 * config.hidden_size * config.padded_vocab_size * LENGTH
    # Projections and feed-forward: a dense layer works on all tokens, a sparse one on 1/K of them.
    layer_tokens = LENGTH * plan.dense_layers + LENGTH // plan.K * plan.sparse_layers
    assert total[aten.mm] - head == 2 * layer_matrices(config) * layer_tokens
    # Scores and weighted sums: all pairs of the tokens that are in the layer.
    pairs = LENGTH**2 * plan.dense_layers + (LENGTH // plan.K) ** 2 * plan.sparse_layers
    assert total[aten.bmm] == 2 * 2 * config.heads * config.head_dim * pairs
    # phi is these two; the head and the routers are left out.
    assert flops_per_token_paper(config, LENGTH) * LENGTH == total[aten.mm] + total[aten.bmm] - head
    # Every router looks at every token.
    assert total.get(aten.mv, 0) == 2 * config.hidden_size * LENGTH * plan.sparse_layers


@variants
def test_true_flops_of_each_layer(config):
    model, counter = count(config)
    counted = counter.get_flop_counts()
    by_layer = [sum(counted.get(f"Transformer.layers.{index}", {}).values()) for index in range(len(model.layers))]
    assert by_layer == layer_flops(config, LENGTH, causal=False)
    assert counter.get_total_flops() == sum(by_layer)


@variants
def test_training_costs_three_forwards(config):
    """Of the routers, the products of the forward (`mv`) are apart."""
    model, counter = count(config, backward=True)
    total = counter.get_flop_counts()["Global"]
    routers = 2 * config.hidden_size * LENGTH * model.context.plan.sparse_layers
    assert total[aten.mm] + total[aten.bmm] + routers == train_flops_per_token(config, LENGTH, False) * LENGTH


def test_a_batch_costs_its_sequences():
    assert count(TOY, batch=3)[1].get_total_flops() == 3 * count(TOY)[1].get_total_flops()
