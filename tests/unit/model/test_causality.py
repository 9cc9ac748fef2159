"""Under the threshold rule a token's logits depend on no later token. Under top-k they do."""

from __future__ import annotations

import pytest
import torch

from tests.unit.model.toy import DENSE, MOD, TOY, make_context, make_model, make_tokens

LENGTH = 24
XMOD_FFN = dict(gate="ffn", residual_scale=False)


def influence(context, position: int) -> tuple[float, float]:
    """Largest change of any logit before, and from, a position where the token is exchanged."""
    model = make_model(context)
    before, after = 0.0, 0.0
    with torch.no_grad():
        for seed in range(4):
            tokens = make_tokens(context, 2, LENGTH, seed)
            changed = tokens.clone()
            changed[:, position] = (tokens[:, position] + 1 + seed) % context.config.vocab_size
            change = (model(changed) - model(tokens)).abs()
            before = max(before, change[:, :position].max().item())
            after = max(after, change[:, position:].max().item())
    return before, after


@pytest.mark.parametrize("position", [1, 11, LENGTH - 1])
@pytest.mark.parametrize(("config", "routing"), [(TOY, {}), (TOY, XMOD_FFN), (MOD, {}), (DENSE, {})],
                         ids=["xmod", "xmod ffn", "mod", "dense"])
def test_threshold_routing_is_causal(config, routing, position):
    before, after = influence(make_context(config, mode="threshold", **routing), position)
    assert before <= 1e-12
    assert after > 1e-2


@pytest.mark.parametrize("position", [11, LENGTH - 1])
@pytest.mark.parametrize("config", [TOY, MOD], ids=["xmod", "mod"])
def test_the_same_check_fails_under_top_k(config, position):
    before, _ = influence(make_context(config), position)
    assert before > 1e-2


def test_threshold_does_route_here():
    """Neither nobody nor everybody, or the test above would be of a dense model."""
    context = make_context(mode="threshold")
    context.statistics = {}
    with torch.no_grad():
        make_model(context)(make_tokens(context, 2, LENGTH))
    selected = torch.cat([figures["selected"] for (figures,) in context.statistics.values()])
    assert ((selected > 0.05) & (selected < 0.95)).sum() >= 6


@pytest.mark.parametrize("config", [TOY, MOD], ids=["xmod", "mod"])
def test_a_prefix_gives_the_logits_of_the_whole(config):
    """Any length works under the threshold, also one that K doesn't divide."""
    context = make_context(config, mode="threshold")
    model, tokens = make_model(context), make_tokens(context, 2, LENGTH)
    with torch.no_grad():
        whole = model(tokens)
        for length in (1, 2, 7, 13):
            assert (model(tokens[:, :length]) - whole[:, :length]).abs().max() <= 1e-12


def test_a_sequence_does_not_depend_on_its_batch():
    """Under the threshold the others' counts decide how much padding there is."""
    for mode in ("threshold", "top_k"):
        context = make_context(mode=mode)
        model, tokens = make_model(context), make_tokens(context, 5, LENGTH)
        with torch.no_grad():
            together = model(tokens)
            for b in range(5):
                assert (model(tokens[b:b + 1]) - together[b:b + 1]).abs().max() <= 1e-12
