"""Validation loss under both routings. The causal one is what the model can do; top-k sees the future."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_xmod.train.engine import Trainable

LOSSES = {"loss_causal": "threshold", "loss_topk": "top_k"}


def evaluate(trainable: Trainable, batches: Callable[[], Iterator], count: int) -> dict[str, float]:
    """Mean loss in nats per token under the causal rule and under top-k, on the same batches.

    Args:
        batches: Gives a fresh iterator over the micro-batches of this process, the same ones at each call.
        count: Global batches.
    """
    engine, context = trainable.engine, trainable.context
    losses = {}
    for name, routing in LOSSES.items():
        context.routing = routing
        iterator = batches()
        losses[name] = sum(engine.eval_batch(iterator).item() for _ in range(count)) / count
    context.routing = "top_k"
    engine.module.train()
    return losses
