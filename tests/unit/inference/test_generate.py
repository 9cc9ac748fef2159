import pytest
import torch

from megatron_xmod.config.schema import ModelConfig, RoutingConfig
from megatron_xmod.inference.cache import KVCache
from megatron_xmod.inference.generate import generate, heal, sample
from megatron_xmod.model.build import Transformer
from megatron_xmod.model.context import ModelContext

LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(hidden_size=16, ffn_size=24, heads=2, kv_heads=1, head_dim=8, vocab_size=30, vocab_multiple=16,
                         active_layers=5, prefix_layers=1, init_std=0.3, routing=RoutingConfig(K=4, A=1))
    return Transformer(ModelContext(config), seed=3)


def shares(**settings) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample(LOGITS, generator=generator, **settings) for _ in range(4000)])
    return (drawn.bincount(minlength=4) / 4000).tolist()


@pytest.mark.parametrize("settings, expected", [
    ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
    ({"temperature": 1.0, "top_k": 2, "top_p": 1.0}, [4 / 7, 3 / 7, 0, 0]),
    ({"temperature": 1.0, "top_k": 0, "top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),  # 0.4 alone has not reached 0.65
    ({"temperature": 1.0, "top_k": 0, "top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ({"temperature": 0.5, "top_k": 0, "top_p": 1.0}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ({"temperature": 0.0, "top_k": 0, "top_p": 1.0}, [1, 0, 0, 0]),
])
def test_sample_draws_from_the_distribution_asked_for(settings, expected):
    assert shares(**settings) == pytest.approx(expected, abs=0.03)  # four standard deviations


def test_greedy_tokens_are_those_of_the_full_forward(model):
    prompt = [1, 2, 3]
    written = list(generate(model, prompt, 20, temperature=0))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + written]))[0, :, :30]
    assert written == logits[2:-1].argmax(-1).tolist()


def test_a_seed_repeats_and_another_does_not(model):
    first, same, other = (list(generate(model, [5], 30, seed=seed)) for seed in (1, 1, 2))
    assert first == same != other


def test_padded_vocabulary_is_never_written(model):
    assert max(generate(model, [5], 300, temperature=50.0, seed=0)) < 30


def test_stops_before_the_stop_token(model):
    written = list(generate(model, [5], 30, temperature=0))
    assert list(generate(model, [5], 30, temperature=0, stop=written[4])) == written[:written.index(written[4])]


def test_the_cache_counts_what_was_executed(model):
    cache = KVCache()
    written = list(generate(model, [5, 6], 10, temperature=0, cache=cache))
    assert cache.length == 2 + len(written) - 1  # the last token is not read back
    dense = model.context.plan.dense_layers * cache.length
    assert dense <= cache.executed_tokens() <= dense + model.context.plan.sparse_layers * cache.length


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="end-of-document"):
        next(generate(model, [], 3))


class _Words:
    """A tokenizer of whole pieces."""

    pieces = ("def", " ", " f", " foo", "0", "de", "\N{REPLACEMENT CHARACTER}")
    vocab_size, eod = len(pieces), 0

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


def test_a_prompt_that_ends_inside_a_token_is_healed(model):
    kept, first = heal(_Words(), [0, 1])  # "def" and a lone space
    assert kept == [0] and first == [1, 2, 3]
    assert next(generate(model, kept, 1, temperature=0, first=first)) in first
    drawn = {next(generate(model, kept, 1, temperature=50.0, seed=seed, first=first)) for seed in range(40)}
    assert drawn == set(first)


@pytest.mark.parametrize("prompt", [[1], [0, 6]], ids=["one token", "part of a character"])
def test_a_prompt_that_can_not_be_healed_stays(prompt):
    assert heal(_Words(), prompt) == (prompt, None)
