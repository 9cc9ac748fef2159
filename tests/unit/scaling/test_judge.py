import numpy as np
import pytest

from megatron_xmod.report import Report
from megatron_xmod.scaling import sections
from megatron_xmod.scaling.fit import Fit, Problem
from megatron_xmod.scaling.judge import fit_scores, joint, leave_groups_out, regrets, scores
from megatron_xmod.scaling.law import PUBLISHED, XMOD
from megatron_xmod.scaling.recovery import NOISE, paper_grid, variables

X = variables(paper_grid())


def test_groups_are_left_out_whole_and_only_their_sweep_is_predicted(noisy):
    seen = []

    def fitter(part):
        seen.append(part)
        return PUBLISHED

    results = leave_groups_out(noisy.problem, "A", fitter)
    assert [result.value for result in results] == [0.5, 2, 3, 4, 5]
    for part, result in zip(seen, results, strict=True):
        assert result.value not in part.x["A"] and set(noisy.problem.x["A"][result.runs]) == {result.value}
    results = leave_groups_out(noisy.problem, "L", fitter)
    assert [len(result.runs) for result in results] == [13, 12, 12, 12, 12]


def test_a_group_without_which_nothing_is_known_is_not_predicted(noisy):
    two = noisy.problem.select((X["L"] <= 4096) | (X["L"] == 32768) & (X["N_act"] == 165e6))
    results = leave_groups_out(two.select(two.x["L"] <= 4096), "L", lambda part: PUBLISHED)
    assert all("fewer than 2 values of L" in result.problem and np.isnan(result.predicted).all() for result in results)


def test_regret_is_the_measured_price_of_the_chosen_K(noisy):
    flat = noisy.problem
    rows = regrets(flat, flat.y)
    assert all(row["regret"] == 0 and row["chosen_K"] == row["best_K"] for row in rows)
    rows = regrets(flat, -flat.y)
    place = (X["N_act"] == 556e6) & (X["L"] == 2048)
    assert rows[[row["L"] for row in rows].index(2048)]["regret"] == pytest.approx(np.ptp(flat.y[place]))


def test_regret_compares_means_over_seeds_at_one_budget():
    x = {"N_act": np.full(8, 1e8), "L": np.full(8, 2048.0), "A": np.ones(8), "K": np.tile([2.0, 2, 4, 4], 2),
         "C": np.repeat([1e18, 4e18], 4) * np.tile([1, 1, 1.02, 1.02], 2)}  # whole steps have split the budgets
    y = np.array([3.0, 3.2, 3.4, 2.9, 2.6, 2.8, 2.5, 2.5])  # means 3.1 and 3.15, then 2.7 and 2.5
    rows = regrets(Problem(XMOD, x, y, np.zeros(8)), np.array([1, 1, 2, 2, 1, 3, 2.5, 2.5]))
    assert [(row["C"], row["chosen_K"], row["best_K"]) for row in rows] == [(1e18, 2, 2), (4e18, 2, 4)]
    assert [row["regret"] for row in rows] == pytest.approx([0, 0.2])


def test_scores_by_hand():
    y, base = np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.0, 1.0])
    result = scores(y, np.array([1.0, 3.0, 4.0]), base)
    assert result["rmse"] == pytest.approx(np.sqrt(1 / 3)) and result["mae"] == pytest.approx(1 / 3)
    assert result["r2"] == pytest.approx(1 - 1 / np.sum((y - y.mean()) ** 2))


def test_fit_scores_match_the_noise(noisy):
    result = fit_scores(noisy)
    assert 0.7 * NOISE < result["rmse"] < 1.1 * NOISE and 0.95 < result["r2"] < 1


def test_held_out_fits_hold_what_the_fit_holds_and_start_from_its_seed(noisy, monkeypatch):
    assert joint(noisy.problem, {"rho_A": 1.0, "rho_K": 0.5}, seed=1)["rho_A"] == 1.0
    at_one = noisy.problem.select(X["A"] == 1)
    assert joint(at_one, {"rho_A": 1.0, "eta_L": 0.5})["eta_L"] == 0.5
    seen = []
    monkeypatch.setattr(sections, "leave_groups_out", lambda problem, by, fitter: seen.append(fitter) or [])
    for fixed, fitters in (({"rho_A": 0.3}, 1), ({}, 2)):
        seen.clear()
        best = Fit(noisy.problem, noisy.params, noisy.objective, fixed)
        sections.held_out(Report(""), best, 7)
        sections.regret(Report(""), best, 7)
        assert len(seen) == 3 * fitters + 1 and all(fitter.keywords["seed"] == 7 for fitter in seen)
        assert all(fitter.keywords["fixed"] == fixed for fitter in seen if fitter.func is joint)
