import json
from pathlib import Path

import numpy as np
import pytest

from megatron_xmod.scaling.law import CANDIDATE, CHINCHILLA, CLARK, KAPLAN, LOG_LINEAR, PUBLISHED, RIVALS, XMOD, Kaplan
from megatron_xmod.scaling.recovery import paper_grid, variables

TABLES = Path(__file__).resolve().parents[4] / "shared" / "paper" / "tables.json"
FORMS = (XMOD, *RIVALS, CHINCHILLA, KAPLAN, CLARK)


def written_out(p, N_act, ratio, L, K, A):
    """Eq. 14, term by term."""
    capacity = p["u"] * N_act ** -p["eta_N"] * (1 - ratio ** -p["rho_N"])
    context = p["w"] * L ** -p["eta_L"] * (K ** p["rho_L"] - 1)
    anchor = p["z"] * (K ** p["rho_K"] - 1) * ((2 * A / (A + 1)) ** p["rho_A"] - 1)
    return p["e"] - capacity + context - anchor


def one(**values):
    return {name: np.array([float(value)]) for name, value in values.items()}


@pytest.mark.parametrize("K, A, layers", [(8, 4, 161), (16, 3, 298), (16, 1, 208), (8, 0.5, 84)])
def test_the_published_law_is_equation_14(K, A, layers):
    run = dict(N_act=556e6, ratio=layers / 28, L=32768, K=K, A=A)
    assert XMOD.predict(PUBLISHED, one(**run))[0] == pytest.approx(written_out(PUBLISHED, **run), rel=1e-12)


def test_table_8_is_copied_rightly():
    if not TABLES.exists():
        pytest.skip("../shared/paper/tables.json is absent")
    table = json.loads(TABLES.read_text())["table8_law"]
    assert {name: table[name] for name in PUBLISHED} == PUBLISHED


def test_parts_add_up_and_vanish_where_they_should():
    x = one(N_act=1e9, ratio=1, L=8192, K=1, A=1)
    parts = XMOD.parts(PUBLISHED, x)
    assert (parts["u"], parts["w"], parts["z"]) == (0, 0, 0)
    x = variables(paper_grid())
    assert np.allclose(sum(XMOD.parts(PUBLISHED, x).values()), XMOD.predict(PUBLISHED, x))


def test_exposure_is_equation_25():
    p = PUBLISHED | {"v": 3.0, "eta_D": 0.2, "rho_D": 0.7}
    x = one(N_act=556e6, ratio=4, L=8192, K=8, A=1, D_dense=1e10, D_sparse=2e10)
    exposure = 3.0 * 1e10**-0.2 * ((2e10 / 8 / 1e10) ** -0.7 - 1)
    assert CANDIDATE.predict(p, x)[0] == pytest.approx(XMOD.predict(PUBLISHED, x)[0] + exposure, rel=1e-10)


def test_chinchilla_kaplan_and_clark_are_their_papers_formulas():
    x = one(N=7e9, D=1.4e12)
    params = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
    assert CHINCHILLA.predict(params, x)[0] == pytest.approx(1.69 + 406.4 / 7e9**0.34 + 410.7 / 1.4e12**0.28)
    params = {"gamma": 0.8, "log_r": 0.3, "alpha_D": 0.095, "scale": 2.2}
    c = Kaplan.constants(params)
    by_hand = ((c["Nc"] / 7e9) ** (c["alpha_N"] / c["alpha_D"]) + c["Dc"] / 1.4e12) ** c["alpha_D"]
    assert KAPLAN.predict(params, x)[0] == pytest.approx(by_hand, rel=1e-10)
    params = {"a": -0.082, "b": -0.108, "c": 0.009, "d": 1.104, "E_start": 1.85, "E_max": 315.0}
    E = 1 / (1 / (64 - 1 + 1 / (1 / 1.85 - 1 / 315)) + 1 / 315)
    n, e = np.log10(1.3e9), np.log10(E)
    assert CLARK.predict(params, one(N=1.3e9, experts=64))[0] == pytest.approx(
        -0.082 * n - 0.108 * e + 0.009 * n * e + 1.104, rel=1e-12)
    assert CLARK.predict(params, one(N=1.3e9, experts=1))[0] == pytest.approx(
        -0.082 * n - 0.108 * np.log10(1.85) + 0.009 * n * np.log10(1.85) + 1.104, rel=1e-12)


def some_runs(form, rng):
    x = {"N_act": 2e8, "N": 1e9, "ratio": 3.0, "L": 4096.0, "K": 6.0, "A": 2.0, "C": 1e20, "dense_loss": 2.5,
         "D_dense": 1e10, "D_sparse": 1.5e10, "D": 2e10, "experts": 8.0}
    return {name: value * rng.uniform(1.1, 3, 7) for name, value in x.items()}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_derivatives_agree_with_differences(form):
    rng = np.random.default_rng(0)
    x = some_runs(form, rng)
    theta = form.low + (form.high - form.low) * rng.uniform(0.1, 0.4, len(form.exponents))
    slopes = form.basis(theta, x)[1]
    for i in range(len(theta)):
        h = np.zeros(len(theta))
        h[i] = 1e-6
        difference = (form.basis(theta + h, x)[0] - form.basis(theta - h, x)[0]) / 2e-6
        assert np.allclose(slopes[i], difference, rtol=1e-5, atol=1e-6 * np.abs(difference).max())
    assert form is LOG_LINEAR or len(slopes)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_printed_parameters_and_inner_ones_agree(form):
    rng = np.random.default_rng(1)
    theta = form.low + (form.high - form.low) * rng.uniform(0.1, 0.4, len(form.exponents))
    c = rng.uniform(0.5, 2, len(form.coefficients))
    again = form.from_public(form.to_public(theta, c))
    assert np.allclose(again[0], theta) and np.allclose(again[1], c)
