from fractions import Fraction

import pytest

from megatron_xmod.depth import DepthPlan, plan_depth
from megatron_xmod.errors import UserError

# X-MoD (arXiv 2609.34212), its layouts and those of table 9: active layers, prefix, K, A -> dense, sparse.
PAPER = {
    "dense": (28, None, 1, 1, 28, 0),
    "mod": (28, 1, 8, 1 / 8, 25, 24),
    "a4k8": (28, 4, 8, 4, 9, 152),
    "a3k16": (28, 4, 16, 3, 10, 288),
    "a1k16": (28, 4, 16, 1, 16, 192),
    "a1k4, 52 layers": (52, 4, 4, 1, 28, 96),
    "a1k8, 52 layers": (52, 4, 8, 1, 28, 192),
    "a1k12, 52 layers": (52, 4, 12, 1, 28, 288),
    "a1k16, 52 layers": (52, 4, 16, 1, 28, 384),
}


@pytest.mark.parametrize("name", PAPER)
def test_layouts_of_the_paper(name):
    active, prefix, K, A, dense, sparse = PAPER[name]
    plan = plan_depth(active, prefix, K, A)
    assert (plan.dense_layers, plan.sparse_layers, plan.layers) == (dense, sparse, dense + sparse)
    assert plan.active_layers == active


def test_first_group_takes_the_remainder():
    assert plan_depth(28, 4, 8, 4).groups == (24, 32, 32, 32, 32)
    assert plan_depth(28, 4, 16, 3).groups == (48,) * 6


def test_remainder_of_zero_is_one_more_prefix_layer():
    # 5 layers after the prefix make 3 groups with A = 1, the first of which is left without sparse layers.
    plan = plan_depth(9, 4, 8, 1)
    assert (plan.prefix_layers, plan.groups) == (5, (8, 8))
    assert plan.active_layers == 9


def test_rounds_are_full_but_for_the_last():
    assert DepthPlan(0, 8, (20,)).rounds(0) == (8, 8, 4)
    assert DepthPlan(0, 8, (16,)).rounds(0) == (8, 8)
    assert plan_depth(28, 1, 8, 1 / 8).rounds(0) == (1,)


def test_prefix_as_deep_as_the_model_is_dense():
    assert plan_depth(12, 12, 8, 4) == plan_depth(12, None, 8, 4) == DepthPlan(12, 8, ())


def test_written_fractions_are_taken_for_what_they_mean():
    assert plan_depth(5, 1, 3, 0.333) == plan_depth(5, 1, 3, 1 / 3)


def test_every_plan_has_the_depth_that_was_asked():
    built = 0
    for active in range(2, 30):
        for prefix in range(0, active):
            for K in (1, 2, 8):
                for A in (Fraction(1, 2), 1, 3):
                    try:
                        plan = plan_depth(active, prefix, K, float(A))
                    except UserError:
                        continue
                    built += 1
                    assert plan.active_layers == active
                    assert all(plan.groups) and plan.prefix_layers >= prefix
    assert built > 1000


def test_A_times_K_no_integer_names_the_nearest():
    with pytest.raises(UserError, match=r"A\*K must be an integer.*3\.875 or 4\.") as error:
        plan_depth(28, 4, 8, 3.95)
    assert "\n" not in str(error.value)


def test_A_that_rounds_to_no_layer_names_one_layer():
    with pytest.raises(UserError, match=r"0\.125"):
        plan_depth(28, 4, 8, 0.01)


def test_unreachable_depth_names_depths_that_work():
    # MoD layers come as 1 + 1/8: 23 active layers after the prefix would need a group with less than none.
    with pytest.raises(UserError, match=r"model\.active_layers = 24 can't be reached.*work: (\d+)") as error:
        plan_depth(24, 1, 8, 1 / 8)
    for depth in str(error.value).rsplit(":", 1)[1].strip(" .").split(" or "):
        assert plan_depth(int(depth), 1, 8, 1 / 8).active_layers == int(depth)


@pytest.mark.parametrize(("active", "prefix"), [(4, 5), (4, -1)])
def test_prefix_beyond_the_depth(active, prefix):
    with pytest.raises(UserError, match=r"model\.prefix_layers .* between 0 and model\.active_layers \(4\)"):
        plan_depth(active, prefix, 8, 1)


@pytest.mark.parametrize(("K", "A"), [(0, 1), (8, 0), (8, -1)])
def test_K_and_A_out_of_range(K, A):
    with pytest.raises(UserError, match="K must be at least 1 and A above 0"):
        plan_depth(28, 4, K, A)
