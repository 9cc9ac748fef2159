"""Routing figures against sets counted by hand, and against the values that simple routings must give."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_xmod.model.router import select_threshold, select_top_k
from megatron_xmod.model.statistics import LAYER_FIGURES, GroupStatistics
from tests.unit.model.toy import make_context, make_model, make_tokens

K = 4


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def collect(scores: list[torch.Tensor], select, scales=None) -> dict:
    statistics = GroupStatistics(scores[0].shape[1], K)
    for score_BS, scale in zip(scores, scales or [None] * len(scores), strict=True):
        selection = select(score_BS)
        statistics.record_soft(score_BS, selection, scale)
    return statistics.finish()


def by_top_k(score_BS):
    return select_top_k(score_BS, score_BS.shape[1] // K)


def top_sets(score_BS):
    """The K-th part of each sequence with the largest scores, as sets of (sequence, position)."""
    return {(b, t) for b, row in enumerate(score_BS.tolist())
            for t in sorted(range(len(row)), key=lambda t: -row[t])[:len(row) // K]}


def threshold_sets(score_BS):
    return {(b, t) for b, row in enumerate(score_BS.tolist()) for t, s in enumerate(row) if s >= 0}


def random_scores(layers, B, S, shift=-0.7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, S, dtype=torch.float64, generator=generator) + shift for _ in range(layers)]


@pytest.mark.parametrize("mode", ["top_k", "threshold"])
def test_layer_figures_by_hand(mode):
    select, sets = {"top_k": (by_top_k, top_sets), "threshold": (select_threshold, threshold_sets)}[mode]
    B, S, scores = 3, 20, random_scores(4, 3, 20)
    scores[2] = -scores[2].abs() - 0.1  # nobody passes the threshold
    scales = [torch.tensor(0.5 + i, requires_grad=True) for i in range(4)]
    figures = collect(scores, select, scales)
    updates = dict.fromkeys([(b, t) for b in range(B) for t in range(S)], 0)
    for layer, score_BS in enumerate(scores):
        taken, passed, top = sets(score_BS), threshold_sets(score_BS), top_sets(score_BS)
        losses = [math.log1p(math.exp(-s if (b, t) in taken else s))
                  for b, row in enumerate(score_BS.tolist()) for t, s in enumerate(row)]
        expected = {
            "selected": len(taken) / (B * S),
            "above_threshold": len(passed) / (B * S),
            "gate": mean(1 / (1 + math.exp(-score_BS[b, t].item())) for b, t in taken) if taken else 0.0,
            "scale": 0.5 + layer,
            "bias": mean(updates.values()),
            "routing_loss": mean(losses),
            "agreement": 1 - len(passed ^ top) / (B * S),
            "precision": len(passed & top) / len(passed) if passed else 0.0,
            "recall": len(passed & top) / len(top),
            "f1": 2 * len(passed & top) / (len(passed) + len(top)),
        }
        assert expected.keys() == set(LAYER_FIGURES)
        assert {name: figures[name][layer].item() for name in expected} == pytest.approx(expected, rel=1e-6)
        for token in taken:
            updates[token] += 1
    assert figures["coverage"].item() == pytest.approx(mean(n > 0 for n in updates.values()), rel=1e-6)
    assert all(not value.requires_grad for value in figures.values())
    assert set(figures) == {*LAYER_FIGURES, "coverage", "overlap"}


def overlap_by_hand(scores, sets, B):
    """Jaccard of consecutive sets: mean over the pairs of a sequence that have one, then over sequences."""
    per_sequence = []
    for b in range(B):
        members = [{t for row, t in sets(score_BS) if row == b} for score_BS in scores]
        pairs = [len(p & q) / len(p | q) for p, q in zip(members, members[1:], strict=False) if p | q]
        if pairs:
            per_sequence.append(mean(pairs))
    return mean(per_sequence)


def test_overlap_by_hand():
    scores = random_scores(5, 6, 40)
    expected = overlap_by_hand(scores, top_sets, 6)
    assert collect(scores, by_top_k)["overlap"].item() == pytest.approx(expected, rel=1e-6)


def test_overlap_leaves_out_pairs_of_nobody():
    scores = random_scores(5, 1, 40)
    scores[1] = scores[2] = -scores[1].abs() - 0.1
    expected = overlap_by_hand(scores, threshold_sets, 1)
    assert collect(scores, select_threshold)["overlap"].item() == pytest.approx(expected, rel=1e-6)
    nobody = [-1 - score.abs() for score in scores]
    assert collect(nobody, select_threshold)["overlap"].item() == 0.0


def test_one_layer_has_no_overlap():
    figures = collect(random_scores(1, 2, 16), by_top_k)
    assert "overlap" not in figures
    assert figures["coverage"].item() == 1 / K


def test_identical_subsets():
    figures = collect(random_scores(1, 2, 64) * 6, by_top_k)
    assert figures["coverage"].item() == 1 / K
    assert figures["overlap"].item() == 1.0
    assert figures["bias"].tolist() == [layer / K for layer in range(6)]


def test_independent_subsets():
    p, layers = 1 / K, 6
    figures = collect(random_scores(layers, 16, 4096), by_top_k)
    assert figures["coverage"].item() == pytest.approx(1 - (1 - p) ** layers, abs=0.005)
    assert figures["overlap"].item() == pytest.approx(p / (2 - p), abs=0.003)


def test_disjoint_subsets():
    scores = [torch.zeros(2, 64) for _ in range(K)]
    for layer, score_BS in enumerate(scores):
        score_BS[:, layer::K] = 1.0
    figures = collect(scores, by_top_k)
    assert (figures["coverage"].item(), figures["overlap"].item()) == (1.0, 0.0)


def test_threshold_that_agrees_with_top_k():
    scores = [score - score.topk(8, dim=1).values[:, -1:] for score in random_scores(2, 3, 32)]
    figures = collect(scores, by_top_k)
    for name in ("agreement", "precision", "recall"):
        assert figures[name].tolist() == [1.0, 1.0]
    # Never selecting agrees on 1 - 1/K of the tokens; precision and recall tell.
    never = collect([score - 100 for score in scores], by_top_k)
    assert (never["agreement"][0].item(), never["precision"][0].item(), never["recall"][0].item()) == (0.75, 0, 0)


@pytest.mark.parametrize("mode", ["top_k", "threshold"])
def test_model_records_what_its_layers_do(mode):
    context = make_context(mode=mode)
    context.statistics = {}
    model, counts = make_model(context), {}
    for index, module in enumerate(model.layers[2:4]):
        module.rounds[-1].register_forward_hook(lambda m, i, out, index=index: counts.update({index: out[1]}))
    with torch.no_grad():
        model(make_tokens(context, 2, 16))
    assert list(context.statistics) == ["group_00", "group_01"]
    for index, (figures,) in enumerate(context.statistics.values()):
        group, last = model.layers[2 + index], counts[index]
        assert figures["selected"].shape == ((2, 6)[index],)
        assert figures["coverage"].item() == pytest.approx((last > 0).double().mean().item())
        assert figures["selected"].sum().item() == pytest.approx(last.mean().item())
        assert figures["bias"][1].item() == pytest.approx(figures["selected"][0].item())
        scales = torch.cat([r.router.scale for r in group.rounds])
        assert torch.allclose(figures["scale"].double(), scales, rtol=1e-6)
        if mode == "top_k":
            assert figures["selected"].tolist() == [0.25] * (2, 6)[index]
        else:
            assert torch.equal(figures["selected"], figures["above_threshold"])


def test_overlap_is_averaged_per_sequence_first():
    scores = random_scores(5, 2, 40, shift=0.0)
    for score_BS in scores[1:]:
        score_BS[0] = -1 - score_BS[0].abs()  # sequence 0 has one pair with anybody in it, sequence 1 has four
    expected = overlap_by_hand(scores, threshold_sets, 2)
    assert collect(scores, select_threshold)["overlap"].item() == pytest.approx(expected, rel=1e-6)


def test_statistics_of_a_short_sequence_are_finite():
    context = make_context(mode="threshold")
    context.statistics = {}
    with torch.no_grad():
        make_model(context)(make_tokens(context, 1, 2))  # shorter than K
    assert all(value.isfinite().all() for (figures,) in context.statistics.values() for value in figures.values())
