import csv

import numpy as np
import pytest

from megatron_xmod.flops import active_params, total_params
from megatron_xmod.scaling.data import read_xmod
from megatron_xmod.scaling.fit import Problem, fit
from megatron_xmod.scaling.judge import fit_scores
from megatron_xmod.scaling.law import PUBLISHED, XMOD
from megatron_xmod.sweep.compare import curve_of, dense_curves, difference, groups
from megatron_xmod.sweep.results import COLUMNS, CURVE_COLUMNS, write_tables
from megatron_xmod.sweep.state import State, read_state
from tests.unit.sweep.conftest import DENSE, leave_finished, loss_of


def finished(plan, loss=loss_of):
    for run in plan.runs:
        leave_finished(run, loss)
    return [(run, read_state(run)) for run in plan.runs]


def rows(path) -> list[dict]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_a_row_per_run_and_a_row_per_validation(plan, tmp_path):
    made = plan(variants={"dense": DENSE, "soft": {}}, seeds=[0, 1])
    pairs = finished(made)
    pairs[3] = (pairs[3][0], State("failed", error="no, room"))
    write_tables(tmp_path, pairs)
    dense, soft, _, failed = found = rows(tmp_path / "runs.csv")
    assert tuple(soft) == COLUMNS and [row["status"] for row in found] == ["done"] * 3 + ["failed"]
    assert (dense["K"], dense["A"], dense["layers"], dense["ratio"]) == ("1", "", "6", "1.0")
    assert (soft["K"], soft["A"], soft["L"], soft["variant"], soft["seed"]) == ("4", "1.5", "64", "soft", "0")
    run = made.runs[1]
    assert float(soft["C"]) == 20 * run.flops_per_step and float(soft["tokens"]) == 20 * 4 * 64
    assert float(soft["loss"]) == float(soft["loss_causal"]) == loss_of(run, 20)
    assert float(soft["gap"]) == pytest.approx(0.01) and soft["config_hash"] == run.hash
    assert (failed["error"], failed["C"], failed["loss"], failed["K"]) == ("no, room", "", "", "4")
    curves = rows(tmp_path / "curves.csv")
    assert tuple(curves[0]) == CURVE_COLUMNS and len(curves) == 3 * 6
    assert float(curves[-1]["flops"]) == float(rows(tmp_path / "runs.csv")[2]["C"])


def test_the_dense_loss_is_read_at_the_same_flops(plan, tmp_path):
    pairs = finished(plan(variants={"dense": DENSE, "soft": {}}))
    write_tables(tmp_path, pairs)
    dense, soft = rows(tmp_path / "runs.csv")
    tokens = float(soft["dense_tokens"])
    assert tokens == pytest.approx(20 * 4 * 64 * float(soft["C"]) / float(dense["C"])) and tokens < 20 * 4 * 64
    assert float(soft["dense_loss"]) == pytest.approx(2 + 3 * tokens**-0.1, abs=1e-3)
    assert dense["dense_loss"] == ""


def test_differences_are_at_the_shorter_end(plan):
    pairs = finished(plan(variants={"dense": DENSE, "soft": {}}, seeds=[0, 1]))
    variants = groups(pairs)[next(iter(groups(pairs)))]
    dense = dense_curves(variants)
    same = difference(variants["soft"], dense, "tokens", "loss_causal")
    assert same.mean == pytest.approx(-0.1) and same.error == pytest.approx(0) and not same.dense_inside
    equal = difference(variants["soft"], dense, "flops", "loss_causal")
    assert equal.at == variants["soft"][0].end("flops") and equal.dense_inside and not equal.own_inside
    assert -0.1 < equal.mean - same.mean < 0  # the dense run has had fewer tokens there
    assert difference(variants["soft"][:1], dense, "flops", "loss_causal").error is None


def test_what_is_not_comparable_is_not_compared(plan):
    pairs = finished(plan(variants={"dense": DENSE, "soft": {}}, grid={"data.seq_length": [64, 128]}))
    assert [sorted(variants) for variants in groups(pairs).values()] == [
        ["dense-seq_length=64", "soft-seq_length=64"], ["dense-seq_length=128", "soft-seq_length=128"]]
    assert curve_of(pairs[0][0], State("unfinished")) is None


def test_of_several_dense_variants_the_best_is_the_reference(plan):
    made = plan(variants={"dense": DENSE, "better": DENSE | {"optimizer.lr": 0.01}, "soft": {}})
    pairs = finished(made, lambda run, step: loss_of(run, step) - run.config.optimizer.lr)
    assert dense_curves(next(iter(groups(pairs).values())))[0].run.variant == "better"


def test_the_table_is_one_that_the_law_is_fitted_to(plan, tmp_path):
    """Invented losses that follow the law exactly: the table satisfies it, and the failed run is skipped."""
    made = plan(variants={"dense": DENSE, "x": {}}, settings={"model.active_layers": 13},
                grid={"model.routing.K": [2, 4, 16], "model.routing.A": [0.5, 1, 3], "data.seq_length":
                      [512, 2048, 8192], "size": {"s": {}, "m": {"model.hidden_size": 256, "model.ffn_size": 768},
                                                  "l": {"model.hidden_size": 1024, "model.ffn_size": 3072}}})
    p = PUBLISHED

    def loss(run, step):
        model, L = run.config.model, run.config.data.seq_length
        N_act, K, A = active_params(model), model.routing.K, model.routing.A
        C = step * run.flops_per_step
        base = 1.5 + 8e3 / N_act + 20 * C ** -0.1
        if model.prefix_layers is None:
            return base
        ratio = total_params(model) / N_act
        return (base + p["e"] - p["u"] * N_act ** -p["eta_N"] * (1 - ratio ** -p["rho_N"])
                + p["w"] * L ** -p["eta_L"] * (K ** p["rho_L"] - 1)
                - p["z"] * (K ** p["rho_K"] - 1) * ((2 * A / (A + 1)) ** p["rho_A"] - 1))

    for run in made.runs:
        leave_finished(run, loss, points=20)
    pairs = [(run, read_state(run)) for run in made.runs]
    sparse = [i for i, run in enumerate(made.runs) if run.config.model.prefix_layers is not None]
    pairs[sparse[0]] = (pairs[sparse[0]][0], State("failed", error="broken"))
    write_tables(tmp_path, pairs)
    read = read_xmod(tmp_path / "runs.csv")
    assert len(read.loss) == len(sparse) - 1 and any("status is failed" in reason for reason in read.left_out)
    expected = [loss(run, run.config.train.steps) for run, state in pairs
                if state.status == "done" and run.config.model.prefix_layers is not None]
    assert np.allclose(read.loss, expected)
    best = fit(Problem(XMOD, read.x, read.loss, read.x["dense_loss"], False, "mse"), starts=0, extra=(p,))
    assert fit_scores(best)["rmse"] < 5e-4
