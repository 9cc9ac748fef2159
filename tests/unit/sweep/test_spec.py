import pytest

from megatron_xmod.errors import UserError
from megatron_xmod.sweep.spec import read_spec


def test_what_is_left_out_has_its_default(sweep):
    spec = read_spec(sweep())
    assert (spec.variants, spec.seeds, spec.budgets, spec.processes, spec.launcher, spec.jobs) == (
        {"": {}}, [1234], [None], 1, "local", None)


@pytest.mark.parametrize("keys, message", [
    ({"varients": {}}, "did you mean variants"),
    ({"model": {}}, "belongs under settings"),
    ({"budget": {"flop": 1e9}}, "budget: {flops: 1e18}"),
    ({"budget": {"flops": 1e9, "stepz": 1}}, "there is no budget.stepz"),
    ({"budget": {"flops": -1}}, "budget.flops is -1"),
    ({"output": ""}, "output is missing"),
    ({"seeds": [1, 1]}, "different whole numbers"),
    ({"seeds": []}, "different whole numbers"),
    ({"processes": 0}, "processes is 0"),
    ({"jobs": "two"}, "jobs is 'two'"),
    ({"launcher": "pbs"}, "local or slurm"),
    ({"variants": {"a": 3}}, "variants is"),
    ({"variants": {}}, "variants is"),
    ({"grid": {"model.routing.K": 4}}, "grid is"),
    ({"configs": "one.yaml"}, "a list of files"),
    ({"settings": {"train.output": "x"}}, "settings has train.output, which follows from output"),
    ({"settings": {"train": {"seed": 1}}}, "settings has train.seed"),
    ({"variants": {"a": {"train.seed": 1}}}, "variants.a has train.seed"),
    ({"grid": {"train.seed": [1, 2]}}, "follows from seeds"),
    ({"grid": {"size": {"s": {"train": {"steps": 3}}}}, "budget": {"flops": 1e9}}, "grid.size.s has train.steps"),
])
def test_mistakes_are_named(sweep, keys, message):
    with pytest.raises(UserError) as error:
        read_spec(sweep(**keys))
    assert message in str(error.value) and "sweep.yaml" in str(error.value)
