"""Where the pipeline's layer list is cut into stages. Pure Python."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

from megatron_xmod.errors import UserError

# Around the blocks and anchor groups: the embedding before them, the final norm and the head after them.
_BEFORE, _AFTER = 1, 2


def cut_stages(costs: list[int], stages: int) -> list[int]:
    """The cut into consecutive stages whose costliest stage is cheapest.

    Args:
        costs: Cost of each unit of the layer list [embedding, block or anchor group..., norm, head]; at least one block
            or group. FLOPs, from `flops.layer_flops`.
        stages: Pipeline stages. Each holds at least one block or anchor group.

    Returns:
        `stages` + 1 bounds: stage i has the units bounds[i] to bounds[i+1] - 1. Among cuts with the same costliest
        stage the more even one is taken, then the one with fewer units in the early stages, which hold more
        micro-batches in flight.

    Raises:
        UserError: where there are more stages than blocks and groups.
    """
    units = len(costs) - _BEFORE - _AFTER
    assert units >= 1 and stages >= 1
    if stages > units:
        raise UserError(f"parallel.pipeline_parallel_size is {stages}, but the model can be cut into at most {units} "
                        f"stages: it has {units} prefix layers and anchor groups and is cut only between them. "
                        f"Sizes that work: 1 to {units}.")
    total = list(accumulate(costs, initial=0))

    @cache
    def best(first: int, left: int) -> tuple[int, int, tuple[int, ...]]:
        """Costliest stage, sum of squares and bounds of the best cut of units[first:] into `left` stages."""
        if left == 1:
            cost = total[-1] - total[first]
            return cost, cost**2, (first, len(costs))
        choices = []
        for end in range(max(first, _BEFORE) + 1, _BEFORE + units - left + 2):
            cost = total[end] - total[first]
            costliest, squares, bounds = best(end, left - 1)
            choices.append((max(cost, costliest), cost**2 + squares, (first, *bounds)))
        return min(choices)

    return list(best(0, stages)[2])


def stage_costs(costs: list[int], bounds: list[int]) -> list[int]:
    """Cost of each stage."""
    return [sum(costs[begin:end]) for begin, end in pairwise(bounds)]


def imbalance(costs: list[int], bounds: list[int]) -> float:
    """Cost of the costliest stage over the mean: 1 is an even cut; an imbalance of 1.1 makes the
    full pipeline 1.1 times slower."""
    stages = stage_costs(costs, bounds)
    return max(stages) * len(stages) / sum(stages)
