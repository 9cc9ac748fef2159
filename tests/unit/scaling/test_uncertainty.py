import numpy as np
import pytest

from megatron_xmod.errors import UserError
from megatron_xmod.scaling import uncertainty
from megatron_xmod.scaling.fit import Fit, fit
from megatron_xmod.scaling.uncertainty import bootstrap, expanded_share, percentile_interval, profile_interval


def test_rho_A_is_not_identified_and_the_others_are(noisy):
    assert not profile_interval(noisy, "rho_A", 0.95).identified
    for name in ("eta_N", "rho_N", "eta_L", "rho_L"):
        interval = profile_interval(noisy, name, 0.95)
        assert interval.identified and interval.low < noisy.params[name] < interval.high


def test_a_profile_ends_where_the_squared_error_has_risen_by_the_f_quantile(noisy):
    interval = profile_interval(noisy, "rho_L", 0.95)
    for end in interval[:2]:
        held = fit(noisy.problem, starts=16, fixed={"rho_L": end})
        assert held.params["rho_L"] == end
        assert held.objective / noisy.objective - 1 == pytest.approx(3.937 / 99, rel=0.02)


def test_a_profile_whose_refits_disagree_ends_at_the_bracket(noisy, monkeypatch):
    rises = iter([10.0])
    monkeypatch.setattr(uncertainty, "refit", lambda start, fixed: Fit(
        noisy.problem, noisy.params, noisy.objective * next(rises, 1.0), fixed))
    end, at_bound = uncertainty._end(noisy, "rho_L", 0.95, 5.0, 1)
    assert end == pytest.approx(1.05 * noisy.params["rho_L"]) and not at_bound


def test_the_bootstrap_draws_whole_clusters(noisy):
    seen = []

    def spy(best, weights):
        seen.append(weights)
        return best

    clusters = np.arange(109) // 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_xmod.scaling.uncertainty.refit", spy)
        bootstrap(noisy, clusters, 3)
    for weights in seen:
        assert all(len(set(weights[clusters == c])) == 1 for c in range(11))
        assert sum(weights[clusters == c][0] for c in range(11)) == 11


def test_bootstrap_intervals_hold_the_estimate_and_repeat_with_the_seed(noisy):
    first, again = (bootstrap(noisy, range(109), 30, seed=5).intervals(0.9) for _ in range(2))
    assert first == again
    assert all(first[name][0] < noisy.params[name] < first[name][1] for name in ("eta_N", "rho_N", "eta_L", "w"))


def test_one_cluster_is_refused(noisy):
    with pytest.raises(UserError, match="all rows are of one \\(x\\)"):
        bootstrap(noisy, ["x"] * 109, 3)
    assert bootstrap(noisy, ["x"] * 109, 0).draws == []


def test_an_interval_of_few_draws_has_its_level():
    low, high = percentile_interval(np.arange(1.0, 10.0), 0.8)
    assert (low, high) == pytest.approx((1, 9))  # a tenth draw is as likely below, above and in each gap


def test_expanded_intervals_of_a_mean_hold_it_as_often_as_they_say():
    """The mean of 8 clusters of 3 equal values each, where the plain percentiles hold it in 70 %, not 80 %."""
    rng = np.random.default_rng(0)
    held = {}
    values = rng.standard_normal((4000, 8))
    for share in (0.8, expanded_share(0.8, runs=24, clusters=8, free=1)):
        drawn = values[np.arange(4000)[:, None, None], rng.integers(8, size=(4000, 199, 8))].mean(axis=2)
        low, high = percentile_interval(drawn.T, share)
        held[share] = np.mean((low <= 0) & (0 <= high))
    plain, expanded = held.values()
    assert plain < 0.75 and expanded == pytest.approx(0.8, abs=0.02)
