from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize, nnls

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.fit import Problem, _Solver, fit, refit, require_runs, two_stage
from megatron_xmod.scaling.law import CANDIDATE, CHINCHILLA, GAIN_BY_COMPUTE, KAPLAN, MULTIPLICATIVE, PUBLISHED, XMOD
from megatron_xmod.scaling.recovery import drawn, paper_grid, variables
from megatron_xmod.scaling.solve import levenberg, linear, objective

X = variables(paper_grid())


@pytest.mark.parametrize("loss, log", [("mse", False), ("huber", False), ("l1", True)])
def test_the_joint_fit_recovers_the_law_exactly_without_noise(loss, log):
    found = fit(replace(drawn(0, 0.0), loss=loss, log=log), starts=16).params
    assert found == pytest.approx(PUBLISHED, rel=1e-4)


def test_two_stages_recover_the_law_exactly_without_noise():
    found = two_stage(drawn(0, 0.0))
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
    best = fit(drawn(seed), starts=8)
    start = best.params | {"v": 0.0, "eta_D": 0.3, "rho_D": 0.5}
    wider = fit(replace(drawn(seed), form=CANDIDATE), starts=0, extra=(start,))
    assert wider.objective <= best.objective * (1 + 1e-12)
    assert all(wider.params[name] >= 0 for name in "uvwz")


def test_a_fit_is_never_worse_than_an_extra_start_that_polishing_spoils(noisy, monkeypatch):
    best = fit(replace(noisy.problem, loss="l1"), starts=8)
    monkeypatch.setattr(_Solver, "polish", lambda self, point: 1.1 * point)
    again = fit(best.problem, starts=1, extra=(best.params,))
    assert again.params == pytest.approx(best.params, rel=1e-12)
    held = fit(best.problem, starts=1, extra=(best.params,), fixed={"rho_A": 0.5})
    assert held.params["rho_A"] == 0.5


def test_more_runs_than_parameters_are_required():
    with pytest.raises(UserError, match="with 10 parameters to fit needs at least 11 runs, but 10"):
        fit(drawn(0, 0.0).select(np.arange(109) < 10))
    with pytest.raises(UserError, match="with 1 parameter to fit needs at least 2 runs, but 1"):
        require_runs(drawn(0, 0.0).select(np.arange(109) < 1), dict.fromkeys(XMOD.names[1:], 1.0))
    fit(drawn(0, 0.0).select(np.arange(109) > 97), starts=2)
    fit(drawn(0, 0.0).select(np.arange(109) > 98), starts=2, fixed={"rho_A": 0.28293})


def test_weights_count_as_repeated_runs():
    full = fit(drawn(0), starts=8)
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
