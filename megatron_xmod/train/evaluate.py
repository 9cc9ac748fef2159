"""Validation loss under both routings. The causal one is what the model can do; top-k sees the future."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_xmod.train.engine import Trainable
from megatron_xmod.train.metrics import gather_routing, summarise_routing

ROUTINGS = {"causal": "threshold", "topk": "top_k"}


def evaluate(trainable: Trainable, batches: Callable[[], Iterator], count: int) -> dict:
    """Mean loss in nats per token under the causal rule and under top-k, on the same batches.

    Args:
        batches: Gives a fresh iterator over the micro-batches of this process, the same ones at each call.
        count: Global batches.

    Returns:
        loss_causal, loss_topk, and what routing did in each, routing_causal and routing_topk (empty for a dense model).
    """
    engine, context = trainable.engine, trainable.context
    found: dict = {}
    for name, context.routing in ROUTINGS.items():
        iterator, context.statistics = batches(), {}
        found[f"loss_{name}"] = sum(engine.eval_batch(iterator).item() for _ in range(count)) / count
        found[f"routing_{name}"] = summarise_routing(gather_routing(context.statistics, context.mesh))
    context.routing, context.statistics = "top_k", None
    engine.module.train()
    return found
