"""Writing text with a trained model, one token at a time, under the causal rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_xmod.inference.cache import KVCache
from megatron_xmod.model.build import Transformer


@torch.inference_mode()
def generate(model: Transformer, prompt: list[int], count: int, *, temperature: float = 1.0, top_k: int = 0,
             top_p: float = 1.0, seed: int | None = None, stop: int | None = None,
             cache: KVCache | None = None) -> Iterator[int]:
    """Yields up to `count` token ids that continue the prompt.

    Args:
        prompt: At least one token id.
        temperature: 0 takes the likeliest token each time.
        top_k: Sample among this many likeliest tokens; 0 among all.
        top_p: Sample among the likeliest tokens that together have this probability.
        stop: Token id that ends the text; it is not yielded.
        cache: Filled while generating; afterwards it tells how many tokens each layer executed.
    """
    if not prompt:
        raise ValueError("the prompt is empty; start with the end-of-document token")
    context = model.context
    context.routing = "threshold"
    cache = KVCache() if cache is None else cache
    device = next(model.parameters()).device
    generator = torch.Generator(device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    tokens = prompt
    for _ in range(count):
        logits_V = model(torch.tensor([tokens], device=device), cache)[0, -1, :context.config.vocab_size].float()
        token = sample(logits_V, temperature, top_k, top_p, generator)
        if token == stop:
            return
        yield token
        tokens = [token]


def sample(logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token id drawn from the logits [V]."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = (logits_V - logits_V.max()).double() / temperature  # at most 0: a tiny temperature can't overflow
    probabilities, order = torch.softmax(logits_V, 0).sort(descending=True, stable=True)
    if top_k:
        probabilities[top_k:] = 0
    # A token stays if those before it have not yet reached top_p; the first always stays.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
