import pytest

from megatron_xmod.errors import UserError
from tests.unit.sweep.conftest import DENSE


def names(plan) -> list[str]:
    return [run.name for run in plan.runs]


def test_every_variant_comes_once_before_the_second_seed(plan):
    made = plan(variants={"dense": DENSE, "soft": {}}, seeds=[3, 7])
    assert names(made) == ["dense-seed=3", "soft-seed=3", "dense-seed=7", "soft-seed=7"]
    assert [run.config.train.seed for run in made.runs] == [3, 3, 7, 7]
    assert {run.config.data.seed for run in made.runs} == {1234}
    assert [run.variant for run in made.runs] == ["dense", "soft"] * 2
    assert len({run.hash for run in made.runs}) == 4
    assert made.runs[0].folder.parts[-3:] == ("out", "runs", "dense-seed=3")


def test_later_layers_win(plan):
    made = plan({"model.routing.bias_scale": 1.0, "optimizer.lr": 0.01}, variants={"a": {"optimizer.lr": 0.02}},
                grid={"optimizer.lr": [0.03]})
    config = made.runs[0].config
    assert (config.model.hidden_size, config.model.routing.bias_scale, config.optimizer.lr) == (32, 1.0, 0.03)


def test_a_grid_is_a_product_in_which_dense_appears_once(plan):
    made = plan(variants={"dense": DENSE, "x": {"model.routing.A": 1}},
                grid={"model.routing.K": [2, 4], "data.seq_length": [64, 128]})
    assert names(made) == ["dense-seq_length=64-seed=1234", "dense-seq_length=128-seed=1234",
                           "x-K=2-seq_length=64-seed=1234", "x-K=2-seq_length=128-seed=1234",
                           "x-K=4-seq_length=64-seed=1234", "x-K=4-seq_length=128-seed=1234"]
    assert not made.left_out


def test_an_axis_may_bundle_settings(plan):
    made = plan(grid={"size": {"small": {}, "wide": {"model.hidden_size": 64, "model.ffn_size": 96}}})
    assert [(run.variant, run.config.model.hidden_size) for run in made.runs] == [("size=small", 32), ("size=wide", 64)]


def test_combinations_that_cannot_be_built_are_left_out_and_named(plan):
    made = plan(grid={"model.routing.K": [3, 4], "model.routing.A": [1, 1.5]})
    assert names(made) == ["K=4-A=1-seed=1234", "K=4-A=1.5-seed=1234"]
    multiple, integer = made.left_out
    assert multiple.startswith("K=3-A=1: data.seq_length (64) must be a multiple")
    assert integer.startswith("K=3-A=1.5: ") and "must be an integer" in integer


def test_a_variant_of_which_nothing_is_left_is_refused(plan):
    with pytest.raises(UserError, match="variant bad can't be built: .*must be an integer"):
        plan(variants={"good": {}, "bad": {"model.routing.A": 0.3}})


@pytest.mark.parametrize("keys, message", [
    ({"settings": {"model.hidden_sise": 3}}, "under settings in .*model.hidden_size"),
    ({"variants": {"a": {"model.routing.T": 3}}}, "in variant a of"),
    ({"grid": {"model.routing.k": [4]}}, "no setting model.routing.k .in the grid of"),
    ({"grid": {"model.routing.K": [4, "four"]}}, "K is 'four'"),
    ({"configs": ["nowhere.yaml"]}, "nowhere.yaml can't be read"),
    ({"settings": {"data.paths": ["nowhere"]}}, "no nowhere.idx"),
    ({"settings": {"data.paths": []}}, "data.paths is empty"),
    ({"settings": {"train.eval_batches": 0}}, "eval_batches is 0"),
    ({"processes": 3, "settings": {"train.global_batch_size": 4}}, "multiple of 3"),
    ({"processes": 2, "settings": {"parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}},
     "2 processes can't be shared"),
    ({"processes": 8, "settings": {"parallel.pipeline_parallel_size": 8}}, "stages"),
    ({"variants": {"a b": {}, "a/b": {"optimizer.lr": 0.1}}}, "two runs would be called a_b"),
])
def test_mistakes_are_refused_at_the_start(plan, keys, message):
    with pytest.raises(UserError, match=message):
        plan(**keys)


def test_steps_follow_from_the_budget(plan):
    made = plan({"data.seq_length": 512}, variants={"dense": DENSE, "soft": {}}, budget={"flops": 5e10})
    dense, soft = (run.config.train.steps for run in made.runs)
    dense_step, soft_step = (run.flops_per_step for run in made.runs)
    assert dense * dense_step >= 5e10 > (dense - 1) * dense_step
    assert soft * soft_step <= 5e10 < (soft + 1) * soft_step
    assert soft > dense > 10
    with pytest.raises(UserError, match="one step takes"):
        plan(variants={"soft": {}}, budget={"flops": 10})


def test_several_budgets_are_an_axis(plan):
    made = plan(budget={"flops": [1e9, 2e9]})
    assert [(run.variant, run.budget) for run in made.runs] == [("C=1e+09", 1e9), ("C=2e+09", 2e9)]


def test_runs_of_different_lengths_share_the_order_of_the_longest(plan):
    made = plan({"data.seq_length": 512}, variants={"dense": DENSE, "soft": {}}, budget={"flops": 5e10})
    assert len({run.config.train.steps for run in made.runs}) == 2
    longest = max(run.config.train.steps for run in made.runs) * 4
    assert {run.config.data.samples for run in made.runs} == {longest}
    assert {run.config.data.samples for run in plan(variants={"dense": DENSE, "soft": {}}).runs} == {None}
