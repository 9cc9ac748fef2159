import numpy as np
import pytest
from scipy.optimize import minimize, nnls

from megatron_xmod.errors import UserError
from megatron_xmod.scaling import profile, study_xmod
from megatron_xmod.scaling.bootstrap import bootstrap, intervals
from megatron_xmod.scaling.fit import Fit, Problem, fit, refit
from megatron_xmod.scaling.judge import fit_scores, joint, leave_groups_out, regrets, scores
from megatron_xmod.scaling.law import CANDIDATE, GAIN_BY_COMPUTE, MULTIPLICATIVE, PUBLISHED, XMOD
from megatron_xmod.scaling.others import CHINCHILLA, KAPLAN
from megatron_xmod.scaling.profile import profile_interval
from megatron_xmod.scaling.recovery import NOISE, coverage
from megatron_xmod.scaling.report import Report
from megatron_xmod.scaling.solve import levenberg, linear, objective
from megatron_xmod.scaling.stages import two_stage
from megatron_xmod.scaling.synthetic import paper_grid, simulate, variables

X = variables(paper_grid())


def problem(noise, seed=0, form=XMOD, loss="mse", log=False):
    y = simulate(X, PUBLISHED, noise, np.random.default_rng(seed))
    return Problem(form, X, y, X["dense_loss"], log, loss)


@pytest.fixture(scope="module")
def noisy():
    return fit(problem(NOISE))


def test_the_grid_has_the_papers_109_different_runs():
    assert len(paper_grid()) == len(set(paper_grid())) == 109


@pytest.mark.parametrize("loss, log", [("mse", False), ("huber", False), ("l1", True)])
def test_the_joint_fit_recovers_the_law_exactly_without_noise(loss, log):
    found = fit(problem(0.0, loss=loss, log=log), starts=16).params
    assert found == pytest.approx(PUBLISHED, rel=1e-4)


def test_two_stages_recover_the_law_exactly_without_noise():
    found = two_stage(problem(0.0))
    assert found.params == pytest.approx(PUBLISHED, rel=1e-4) and abs(found.sweep_offset) < 1e-8


@pytest.mark.parametrize("form, extra", [(MULTIPLICATIVE, {}), (GAIN_BY_COMPUTE, {"kappa": 0.1})])
def test_rivals_recover_themselves(form, extra):
    truth = PUBLISHED | extra
    y = X["dense_loss"] + form.predict(truth, X)
    assert fit(Problem(form, X, y, X["dense_loss"])).params == pytest.approx(truth, rel=1e-3)


def test_kaplan_recovers_itself():
    rng = np.random.default_rng(0)
    x = {"N": 10 ** rng.uniform(8, 10, 40), "D": 10 ** rng.uniform(9, 12, 40)}
    truth = {"gamma": 0.8, "log_r": 0.3, "alpha_D": 0.095, "scale": 2.2}
    assert fit(Problem(KAPLAN, x, KAPLAN.predict(truth, x), np.zeros(40), True)).params == pytest.approx(truth, 1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_candidate_never_fits_worse_than_the_law_inside_it(seed):
    best = fit(problem(NOISE, seed), starts=8)
    start = best.params | {"v": 0.0, "eta_D": 0.3, "rho_D": 0.5}
    wider = fit(problem(NOISE, seed, CANDIDATE), starts=0, extra=(start,))
    assert wider.objective <= best.objective * (1 + 1e-12)
    assert all(wider.params[name] >= 0 for name in "uvwz")


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
    monkeypatch.setattr(profile, "refit", lambda start, fixed: Fit(
        noisy.problem, noisy.params, noisy.objective * next(rises, 1.0), fixed))
    end, at_bound = profile._end(noisy, "rho_L", 0.95, 5.0, 1)
    assert end == pytest.approx(1.05 * noisy.params["rho_L"]) and not at_bound


def test_intervals_cover_about_as_often_as_they_say():
    """A small look; `python -m megatron_xmod.scaling.recovery` makes the real one with 50 draws."""
    shares = coverage(repetitions=4, bootstraps=0)
    assert 0.6 <= np.mean([shares[name]["profile"] for name in shares]) <= 1.0
    assert shares["rho_A"]["identified"] <= 0.5 and shares["rho_N"]["identified"] == 1


def test_groups_are_left_out_whole_and_only_their_sweep_is_predicted(noisy):
    seen = []

    def fitter(part):
        seen.append(part)
        return PUBLISHED

    results = leave_groups_out(noisy.problem, "A", fitter)
    assert [result.value for result in results] == [0.5, 2, 3, 4, 5]
    for part, result in zip(seen, results, strict=True):
        assert result.value not in part.x["A"] and set(X["A"][result.runs]) == {result.value}
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


def test_scores_by_hand():
    y, base = np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.0, 1.0])
    result = scores(y, np.array([1.0, 3.0, 4.0]), base)
    assert result["rmse"] == pytest.approx(np.sqrt(1 / 3)) and result["mae"] == pytest.approx(1 / 3)
    assert result["r2"] == pytest.approx(1 - 1 / np.sum((y - y.mean()) ** 2))


def test_more_runs_than_parameters_are_required():
    with pytest.raises(UserError, match="with 10 parameters to fit needs at least 11 runs, but 10"):
        fit(problem(0.0).select(np.arange(109) < 10))
    fit(problem(0.0).select(np.arange(109) > 97), starts=2)
    fit(problem(0.0).select(np.arange(109) > 98), starts=2, fixed={"rho_A": 0.28293})


def test_the_bootstrap_draws_whole_clusters(noisy):
    seen = []

    def spy(best, weights):
        seen.append(weights)
        return best

    clusters = np.arange(109) // 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_xmod.scaling.bootstrap.refit", spy)
        bootstrap(noisy, clusters, 3)
    for weights in seen:
        assert all(len(set(weights[clusters == c])) == 1 for c in range(11))
        assert sum(weights[clusters == c][0] for c in range(11)) == 11


def test_bootstrap_intervals_hold_the_estimate_and_repeat_with_the_seed(noisy):
    first, again = (intervals(bootstrap(noisy, range(109), 30, seed=5), 0.9) for _ in range(2))
    assert first == again
    assert all(first[name][0] < noisy.params[name] < first[name][1] for name in ("eta_N", "rho_N", "eta_L", "w"))


def test_weights_count_as_repeated_runs():
    full = fit(problem(NOISE), starts=8)
    times = np.random.default_rng(0).integers(0, 3, 109)
    rows = np.repeat(np.arange(109), times)
    repeated = Problem(XMOD, {k: v[rows] for k, v in X.items()}, full.problem.y[rows], X["dense_loss"][rows])
    weighted = refit(full, times.astype(float))
    assert weighted.objective == pytest.approx(fit(repeated, starts=8, extra=(full.params,)).objective, rel=1e-6)


def test_linear_solves_mixed_constraints():
    rng = np.random.default_rng(0)
    for _ in range(20):
        columns, y = rng.normal(size=(12, 4)), rng.normal(size=12)
        free = np.array([True, False, False, False])
        c = linear(columns, y, free)
        split = np.concatenate([columns, -columns[:, :1]], axis=1)
        reference = nnls(split, y)[1]
        assert np.all(c[1:] >= 0) and np.linalg.norm(columns @ c - y) == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize("delta", [np.inf, 0.3, 1e-3])
def test_levenberg_finds_the_minimum_of_a_robust_line(delta):
    rng = np.random.default_rng(1)
    J, y = np.stack([np.ones(40), rng.normal(size=40)], axis=1), rng.standard_t(2, size=40)
    weights = rng.uniform(0, 2, 40)
    low, high = np.array([-np.inf, 0.2]), np.array([np.inf, np.inf])
    x = levenberg(lambda p: (J @ p - y, J), np.array([0.0, 1.0]), low, high, weights, delta)
    value = objective(J @ x - y, weights, delta)
    other = min(minimize(lambda p: objective(J @ np.array([p[0], max(p[1], 0.2)]) - y, weights, delta), start,
                         method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000}).fun
                for start in ([0.0, 1.0], [1.0, 0.3]))
    assert value <= other * (1 + 1e-9)


def test_chinchilla_recovers_itself_under_every_loss():
    rng = np.random.default_rng(0)
    x = {"N": 10 ** rng.uniform(8, 10, 60), "D": 10 ** rng.uniform(9, 12, 60)}
    truth = {"alpha": 0.34, "beta": 0.28, "E": 1.69, "A": 406.4, "B": 410.7}
    y = CHINCHILLA.predict(truth, x)
    y[:5] *= 1.2  # outliers, which only least squares minds
    for loss, exact in (("l1", True), ("mse", False)):
        found = fit(Problem(CHINCHILLA, x, y, np.zeros(60), True, loss)).params
        assert (found == pytest.approx(truth, rel=1e-4)) is exact


def test_fit_scores_match_the_noise(noisy):
    result = fit_scores(noisy)
    assert 0.7 * NOISE < result["rmse"] < 1.1 * NOISE and 0.95 < result["r2"] < 1


def test_held_out_fits_hold_what_the_fit_holds_and_start_from_its_seed(noisy, monkeypatch):
    assert joint(noisy.problem, {"rho_A": 1.0, "rho_K": 0.5}, seed=1)["rho_A"] == 1.0
    at_one = noisy.problem.select(X["A"] == 1)
    assert joint(at_one, {"rho_A": 1.0, "eta_L": 0.5})["eta_L"] == 0.5
    seen = []
    monkeypatch.setattr(study_xmod, "leave_groups_out", lambda problem, by, fitter: seen.append(fitter) or [])
    for fixed, fitters in (({"rho_A": 0.3}, 1), ({}, 2)):
        seen.clear()
        best = Fit(noisy.problem, noisy.params, noisy.objective, fixed)
        study_xmod._held_out(Report(""), best, 7)
        study_xmod._regret(Report(""), best, 7)
        assert len(seen) == 3 * fitters + 1 and all(fitter.keywords["seed"] == 7 for fitter in seen)
        assert all(fitter.keywords["fixed"] == fixed for fitter in seen if fitter.func is joint)
