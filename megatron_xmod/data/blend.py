"""Megatron's greedy blend of several datasets."""

from collections.abc import Sequence

import numpy as np

RUN = 4096  # draws per run of `blending_indices`


def normalize(weights: Sequence[float]) -> np.ndarray:
    """float64 weights that sum to 1."""
    values = np.asarray(weights, dtype=np.float64)
    return values / values.sum()


def blending_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which dataset each of `size` draws takes from, and its how-many-th sample it takes.

    Draw k takes from the dataset i that lags most behind: the first maximum of `weights[i] · max(k, 1) − counts[i]`.

    A draw depends on all earlier ones, but two sequences of draws that begin with different counts soon meet. So runs
    of draws are made side by side, each from a guess of its counts, and runs whose guess proves wrong are made again
    from what the run before them ended with, until all agree. The result is exact; only the speed rests on the meeting.

    Args:
        weights: [M] normalised.
        size: draws.

    Returns:
        int16 [size] dataset numbers, int64 [size] sample numbers.
    """
    datasets = len(weights)
    runs = -(-size // RUN)
    begins = np.arange(runs, dtype=np.int64) * RUN
    counts = np.floor(weights * begins[:, None])  # [runs, M], the guess: the exact share rounded by largest remainder
    short = begins - counts.sum(axis=1).astype(np.int64)
    rank = np.argsort(np.argsort(counts - weights * begins[:, None], axis=1, kind="stable"), axis=1)
    counts += rank < short[:, None]
    chosen = np.empty((runs, RUN), dtype=np.int16)
    ends = np.empty_like(counts)
    stale = np.arange(runs)
    while len(stale):
        _draw_runs(weights, begins[stale], counts, stale, chosen, ends)
        wrong = np.flatnonzero(np.any(counts[1:] != ends[:-1], axis=1)) + 1
        counts[wrong] = ends[wrong - 1]
        stale = wrong
    dataset_index = chosen.reshape(-1)[:size].copy()
    sample_index = np.empty(size, dtype=np.int64)
    for dataset in range(datasets):
        rows = np.flatnonzero(dataset_index == dataset)
        sample_index[rows] = np.arange(len(rows))
    return dataset_index, sample_index


def _draw_runs(weights, begins, counts, rows, chosen, ends) -> None:
    """Make the draws of the runs `rows` in step, from `counts[rows]`; fill `chosen[rows]` and `ends[rows]`."""
    current = counts[rows].T.copy()  # [M, rows], the fast way round for argmax
    draws = np.empty((RUN, len(rows)), dtype=np.int16)
    every = np.arange(len(rows))
    for step in range(RUN):
        best = np.argmax(weights[:, None] * np.maximum(begins + step, 1.0) - current, axis=0)
        current[best, every] += 1
        draws[step] = best
    chosen[rows], ends[rows] = draws.T, current.T


class BlendedDataset:
    """Samples of several datasets in the proportion of their weights.

    Args:
        datasets: each gives int64 [S + 1] per sample and has at least the samples the blend draws from it.
        dataset_index: [size], see `blending_indices`.
        sample_index: [size].
    """

    def __init__(self, datasets: list, dataset_index: np.ndarray, sample_index: np.ndarray):
        self.datasets = datasets
        self.dataset_index, self.sample_index = dataset_index, sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """int64 [S + 1]: the tokens of draw `index`; IndexError outside `[0, len(self))`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.datasets[self.dataset_index[index]][int(self.sample_index[index])]
