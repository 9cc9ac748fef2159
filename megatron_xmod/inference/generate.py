"""Writing text with a trained model, one token at a time, under the causal rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_xmod.data.tokenizer import Tokenizer
from megatron_xmod.inference.cache import KVCache
from megatron_xmod.model.build import Transformer


@torch.inference_mode()
def generate(model: Transformer, prompt: list[int], count: int, *, temperature: float = 1.0, top_k: int = 0,
             top_p: float = 1.0, seed: int | None = None, stop: int | None = None, first: list[int] | None = None,
             cache: KVCache | None = None) -> Iterator[int]:
    """Yields up to `count` token ids that continue the prompt.

    Args:
        prompt: At least one token id.
        temperature: 0 takes the likeliest token each time.
        top_k: Sample among this many likeliest tokens; 0 among all.
        top_p: Sample among the likeliest tokens that together have this probability.
        stop: Token id that ends the text; it is not yielded.
        first: The token ids that the first one may be; None for any (see `heal`).
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
    for number in range(count):
        logits_V = model(torch.tensor([tokens], device=device), cache)[0, -1, :context.config.vocab_size].float()
        if number == 0 and first is not None:
            logits_V = torch.full_like(logits_V, float("-inf")).index_copy_(
                0, torch.tensor(first, device=device), logits_V[first])
        token = sample(logits_V, temperature, top_k, top_p, generator)
        if token == stop:
            return
        yield token
        tokens = [token]


def heal(tokenizer: Tokenizer, prompt: list[int]) -> tuple[list[int], list[int] | None]:
    """The prompt without its last token, and the tokens that may come in its place: whose text begins with its text.

    Where a prompt ends is rarely where the tokenizer would end a token: "def " ends with a space of its own, but in
    training text a space belongs to the word that follows, so after a lone space the model expects what never has one
    (a digit, say).
    """
    *kept, last = prompt
    text = tokenizer.decode([last])
    if not kept or not text or "\N{REPLACEMENT CHARACTER}" in text:
        return prompt, None
    return kept, [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]).startswith(text)]


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
