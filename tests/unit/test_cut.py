import random
from itertools import combinations

import pytest

from megatron_xmod.errors import UserError
from megatron_xmod.parallel.cut import cut_stages, imbalance, stage_costs


def all_cuts(costs, stages):
    """Every cut in which the embedding has a unit after it and the norm and the head one before them."""
    for inner in combinations(range(2, len(costs) - 2), stages - 1):
        yield [0, *inner, len(costs)]


@pytest.mark.parametrize("seed", range(20))
def test_costliest_stage_is_the_least_possible(seed):
    draw = random.Random(seed)
    costs = [draw.randint(0, 3), *(draw.randint(1, 50) for _ in range(draw.randint(3, 9))), 0, draw.randint(0, 80)]
    for stages in range(1, len(costs) - 2):
        bounds = cut_stages(costs, stages)
        assert bounds in list(all_cuts(costs, stages))
        least = min(max(stage_costs(costs, cut)) for cut in all_cuts(costs, stages))
        assert max(stage_costs(costs, bounds)) == least


def test_one_stage_has_everything():
    assert cut_stages([0, 5, 5, 0, 1], 1) == [0, 5]


def test_embedding_goes_first_and_norm_and_head_go_last():
    # Each end costs more than all blocks, so the optimum would leave the ends alone if it could.
    assert cut_stages([100, 1, 1, 1, 100, 100], 2) in ([0, 2, 6], [0, 3, 6])
    assert cut_stages([100, 1, 1, 1, 100, 100], 3) == [0, 2, 3, 6]


def test_a_heavy_head_leaves_blocks_to_the_earlier_stages():
    assert cut_stages([0, *[10] * 8, 0, 20], 2) == [0, 6, 11]


def test_of_equal_cuts_the_more_even_one():
    # The last stage costs 30 however the others are cut.
    assert stage_costs([0, 5, 5, 5, 5, 10, 0, 20], cut_stages([0, 5, 5, 5, 5, 10, 0, 20], 3)) == [10, 10, 30]


def test_of_equally_even_cuts_fewer_units_come_first():
    assert cut_stages([0, 10, 10, 10, 0, 0], 2) == [0, 2, 6]


def test_imbalance_is_the_costliest_stage_over_the_mean():
    assert imbalance([0, 30, 10, 0, 0], [0, 2, 5]) == pytest.approx(30 / 20)
    assert imbalance([0, 10, 10, 0, 0], [0, 2, 5]) == 1


def test_more_stages_than_units_names_the_sizes_that_work():
    costs = [0, 10, 10, 10, 0, 5]
    with pytest.raises(UserError, match=r"pipeline_parallel_size is 4.*at most 3 stages.*1 to 3"):
        cut_stages(costs, 4)
    assert cut_stages(costs, 3) == [0, 2, 3, 6]
