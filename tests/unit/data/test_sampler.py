"""Who reads which samples."""

import pytest

from megatron_xmod.data.sampler import BatchSampler
from megatron_xmod.errors import UserError


def deal(total, consumed, micro_batch_size, ranks):
    """Samples in the order of use: micro-batch by micro-batch, rank by rank."""
    samplers = [BatchSampler(total, consumed, micro_batch_size, rank, ranks) for rank in range(ranks)]
    assert len({len(sampler) for sampler in samplers}) == 1
    return [i for batches in zip(*samplers, strict=True) for batch in batches for i in batch]


@pytest.mark.parametrize(("micro_batch_size", "ranks"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_ranks_share_consecutive_samples(micro_batch_size, ranks):
    assert deal(24, 0, micro_batch_size, ranks) == list(range(24))


def test_rest_is_left_out():
    assert deal(23, 0, 2, 3) == list(range(18))
    assert len(BatchSampler(23, 0, 2, 0, 3)) == 3


def test_resume_goes_on_with_the_next_sample_on_other_ranks():
    first = BatchSampler(24, 0, 2, 1, 2)
    iterator = iter(first)
    assert [list(next(iterator)) for _ in range(3)] == [[2, 3], [6, 7], [10, 11]]
    assert first.consumed_samples == 12 and len(first) == 3
    assert deal(24, first.consumed_samples, 1, 3) == list(range(12, 24))


@pytest.mark.parametrize("consumed", [8, 10, 11])
def test_nothing_left(consumed):
    with pytest.raises(UserError, match=f"{consumed} of 10 samples are consumed"):
        BatchSampler(10, consumed, 3, 0, 1)
