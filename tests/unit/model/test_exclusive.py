"""Exclusive rounds: batched = one by one = the rule written out token by token.

Shapes: B batch, S sequence, R layers in the round.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_xmod.inference.cache import KVCache
from megatron_xmod.kernels.reference import select_round
from megatron_xmod.model.context import ModelContext
from megatron_xmod.model.exclusive import own_by_threshold, routing_losses
from megatron_xmod.model.router import Selection, selection_mask
from megatron_xmod.model.sparse import SparseRound
from tests.unit.model.reference import BLOCK, SlowModel
from tests.unit.model.toy import TOY, bits, distance, make_context, make_hidden, make_model, make_tokens, scramble

MODES = pytest.mark.parametrize("mode", ["top_k", "threshold"])
SIZES = [(4, 4), (8, 8), (8, 4), (16, 16), (8, 1)]
LENGTH = 64


def random_scores(layers: int, batch: int = 3, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, layers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_round(mode, K, layers, one_by_one, gate):
    """Output, counts and all gradients (input first) of one round under a loss that weighs every number differently."""
    context = exclusive(mode, K=K, one_by_one=one_by_one, gate=gate, residual_scale=gate == "residual")
    sparse_round = scramble(SparseRound(context, layers)).double()
    x_BSD = make_hidden(context, 2, LENGTH).requires_grad_()
    taken_BS = (torch.arange(2 * LENGTH).view(2, LENGTH) % 3).double()
    out, taken = sparse_round(x_BSD, taken_BS)
    weights = make_hidden(context, 2, LENGTH, seed=1)
    (out * weights).sum().backward()
    return out.detach(), taken, [x_BSD.grad, *(p.grad for p in sparse_round.parameters())]


def exclusive(mode: str = "top_k", model: dict | None = None, **routing) -> ModelContext:
    """The context of a toy model with exclusive rounds."""
    base = replace(TOY, routing=replace(TOY.routing, mode="exclusive"))
    return make_context(base, mode=mode, model=model, **routing)


@pytest.mark.parametrize("gate", ["residual", "ffn"])
@pytest.mark.parametrize(("K", "layers"), SIZES)
def test_batched_is_one_by_one(K, layers, gate):
    """Under top-k; the threshold always runs one by one, and is held to the rule written out below."""
    batched, slow = (run_round("top_k", K, layers, one_by_one, gate) for one_by_one in (False, True))
    assert distance(batched[0], slow[0]) <= 1e-12
    assert torch.equal(batched[1], slow[1])
    for ours, theirs in zip(batched[2], slow[2], strict=True):
        assert distance(ours, theirs) <= 1e-12


class SlowExclusive(SlowModel):
    """Each layer of a round chooses among the tokens that no layer of the round has; b counts rounds."""

    def _sparse_layers(self, x, layer, size):
        K = self.c.routing.K
        rounds_taken = [[0] * len(row) for row in x]
        for first in range(0, size, K):
            name = f"layers.{layer}.rounds.{first // K}."
            layers = min(K, size - first)
            owners = [[None] * len(row) for row in x]
            for j in range(layers):
                x = self._one(x, name, j, j == K - 1, owners, rounds_taken)
            for row, counts in zip(owners, rounds_taken, strict=True):
                for t, owner in enumerate(row):
                    counts[t] += owner is not None
            self.counts.append([list(row) for row in rounds_taken])
        return x

    def _one(self, x, name, j, takes_rest, owners, rounds_taken):
        r, weights = self.c.routing, {key: self.p[f"{name}block.{key}"][j] for key in BLOCK}
        router = {key: self.p[f"{name}router.{key}"][j] for key in ("weight", "bias", "scale")
                  if f"{name}router.{key}" in self.p}
        losses, out = [], []
        for row, owner, b in zip(x, owners, rounds_taken, strict=True):
            free = [t for t in range(len(row)) if owner[t] is None]
            s = {t: router["weight"] @ row[t] + router.get("bias", 0.0) - r.bias_scale * b[t] for t in free}
            if self.threshold:
                chosen = [t for t in free if takes_rest or s[t].item() >= 0]
            else:
                chosen = sorted(sorted(free, key=lambda t: (-s[t].item(), t))[:len(row) // r.K])
            updates, row = self._updates(row, chosen, weights), list(row)
            for t in chosen:
                row[t] = row[t] + router.get("scale", 1.0) / (1 + torch.exp(-s[t])) * sum(updates[t])
                owner[t] = j
            losses += [torch.log(1 + torch.exp(-s[t] if t in chosen else s[t])) for t in free]
            out.append(row)
        if losses and not takes_rest:
            self.routing_loss = self.routing_loss + sum(losses) / len(losses)
        return out


@MODES
@pytest.mark.parametrize("one_by_one", [False, True], ids=["batched", "one by one"])
@pytest.mark.parametrize("K, A, prefix, active", [(4, 1.5, 0, 5), (4, 1.0, 1, 5), (8, 0.5, 1, 4), (4, 2.25, 0, 13)])
def test_against_the_rule_written_out(mode, one_by_one, K, A, prefix, active):
    context = exclusive(mode, {"active_layers": active, "prefix_layers": prefix}, K=K, A=A, one_by_one=one_by_one)
    model = make_model(context)
    tokens = make_tokens(context, 2, 16)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    slow = SlowExclusive(parameters, context.config, prefix, context.plan.groups, mode == "threshold")
    logits, expected = model(tokens), slow(tokens)
    assert distance(logits, expected) <= 1e-11
    logits.square().mean().backward()
    (expected.square().mean() + context.config.routing.loss_coefficient * slow.routing_loss).backward()
    for name, p in model.named_parameters():
        expected = parameters[name].grad
        assert (p.grad is None) == (expected is None), name  # a layer that no token entered
        assert expected is None or distance(p.grad, expected) <= 1e-9, name


@MODES
@pytest.mark.parametrize(("K", "layers"), SIZES)
def test_each_token_is_taken_at_most_once_and_all_of_them_by_a_full_round(mode, K, layers):
    score_BSR = random_scores(layers)
    owner_BS, positions_RBK = select_round(score_BSR, LENGTH // K)
    if mode == "threshold":
        owner_BS = own_by_threshold(score_BSR, layers == K)
    assert ((0 <= owner_BS) & (owner_BS <= layers)).all()
    assert (owner_BS < layers).all() == (layers == K)
    if mode == "top_k":
        masks = torch.stack([selection_mask(Selection(p), LENGTH) for p in positions_RBK])
        assert torch.equal(masks, torch.stack([owner_BS == layer for layer in range(layers)]))
        assert (masks.sum(-1) == LENGTH // K).all() and (positions_RBK.diff() > 0).all()


def test_top_k_takes_the_best_of_the_rest():
    score_BSR = torch.tensor([[[3.0, 9.0], [2.0, 8.0], [1.0, 7.0], [0.0, 7.0], [-1.0, 7.5], [-2.0, 0.0]]])
    assert select_round(score_BSR, 2)[0].tolist() == [[0, 0, 1, 2, 1, 2]]  # of 7.0 and 7.0, the earlier


def test_threshold_enters_the_first_layer_that_lets_it():
    score_BSR = torch.tensor([[[-1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, 5.0]]])
    assert own_by_threshold(score_BSR, False).tolist() == [[1, 0, 3, 2]]
    assert own_by_threshold(score_BSR, True).tolist() == [[1, 0, 2, 2]]


def test_a_last_layer_that_takes_the_rest_has_no_routing_loss():
    score_BSR = random_scores(4)
    owner_BS, _ = select_round(score_BSR, LENGTH // 4)
    assert routing_losses(score_BSR, owner_BS, True)[-1] == 0 < routing_losses(score_BSR, owner_BS, False)[-1]


@MODES
def test_coverage_of_a_group_is_one_for_a_of_at_least_one(mode):
    context = exclusive(mode, A=1.5)
    assert context.plan.groups == (2, 6)  # the first has no full round
    context.statistics = {}
    with torch.no_grad():
        make_model(context)(make_tokens(context, 2, LENGTH))
    (first,), (second,) = context.statistics.values()
    assert first["coverage"] < 1 and second["coverage"] == 1
    assert len(second["selected"]) == 6 and second["selected"][:4].sum() == 1


def test_untouched_tokens_keep_their_bits():
    context = exclusive(K=8)
    sparse_round = scramble(SparseRound(context, 3)).double()
    x_BSD = make_hidden(context, 2, LENGTH)
    out, taken_BS = sparse_round(x_BSD, torch.zeros(2, LENGTH, dtype=torch.float64))
    untouched = taken_BS == 0
    assert untouched.sum() == 2 * LENGTH * 5 / 8
    assert torch.equal(bits(out[untouched]), bits(x_BSD[untouched]))


def test_decoding_step_by_step_is_the_full_forward_and_causal():
    context = exclusive("threshold")
    model = make_model(context)
    tokens = make_tokens(context, 1, 40)
    with torch.no_grad():
        full = model(tokens)
        cache = KVCache()
        steps = torch.cat([model(tokens[:, :7], cache), *(model(tokens[:, t:t + 1], cache) for t in range(7, 40))], 1)
        assert (steps - full).abs().max() <= 1e-12
        later = tokens.clone()
        later[0, 30:] = (later[0, 30:] + 1) % context.config.vocab_size
        assert (model(later)[:, :30] - full[:, :30]).abs().max() <= 1e-12
        context.routing = "top_k"
        assert (model(later)[:, :30] - model(tokens)[:, :30]).abs().max() > 1e-3


@pytest.mark.parametrize("one_by_one", [False, True], ids=["batched", "one by one"])
def test_recomputation_gives_the_same_bits(one_by_one):
    results = []
    for recompute in (False, True):
        context = exclusive(one_by_one=one_by_one)
        context.recompute = recompute
        model = make_model(context, torch.float32)
        logits = model(make_tokens(context, 2, 16))
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
