"""The greedy blend, made in runs side by side, against the plain loop."""

import numpy as np
import pytest

from megatron_xmod.data.blend import RUN, BlendedDataset, blending_indices, normalize


def plain_loop(weights, size):
    counts, datasets, samples = [0] * len(weights), [], []
    for draw in range(size):
        lag = [weight * max(draw, 1) - count for weight, count in zip(weights.tolist(), counts, strict=True)]
        best = lag.index(max(lag))
        datasets.append(best)
        samples.append(counts[best])
        counts[best] += 1
    return datasets, samples


@pytest.mark.parametrize(
    "weights",
    [[1.0], [0.3, 0.7], [1, 1, 1], [5, 1, 2.5, 0.01], [1e-4, 1, 2, 3e-3, 0.7], list(np.random.RandomState(0).rand(40))],
)
@pytest.mark.parametrize("size", [1, 1000, 3 * RUN, 5 * RUN + 17])
def test_equals_the_plain_loop(weights, size):
    weights = normalize(weights)
    datasets, samples = blending_indices(weights, size)
    assert datasets.dtype == np.int16 and samples.dtype == np.int64
    expected = plain_loop(weights, size)
    assert datasets.tolist() == expected[0] and samples.tolist() == expected[1]


def test_rare_dataset_is_drawn_exactly_across_runs():
    weights = normalize([1, 1, 3e-5])
    datasets, _ = blending_indices(weights, 30 * RUN)
    assert datasets.tolist() == plain_loop(weights, 30 * RUN)[0]
    assert np.count_nonzero(datasets == 2) == pytest.approx(30 * RUN * 1.5e-5, abs=1)


def test_dataset_reads_through():
    dataset = BlendedDataset([[10, 11], [20, 21]], np.array([1, 0, 1], np.int16), np.array([0, 0, 1]))
    assert [dataset[i] for i in range(len(dataset))] == [20, 10, 21]
    with pytest.raises(IndexError):
        dataset[3]
