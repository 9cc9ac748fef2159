"""Which samples each data-parallel rank reads, and in which order."""

from collections.abc import Iterator

import numpy as np

from megatron_xmod.errors import UserError


class BatchSampler:
    """Consecutive samples, dealt to the data-parallel ranks one micro-batch at a time.

    The position is one number, `consumed_samples`, counted over all ranks: a run that resumes with it goes on with the
    very next sample, also with another number of ranks or another micro-batch size. The number of micro-batches is
    known beforehand (`len`) and the same on all ranks; a rest too small for every rank is left out.

    Args:
        total_samples: samples that exist, len(dataset).
        consumed_samples: where to begin.
        micro_batch_size: B, samples per rank and micro-batch.
        rank: this process in the data-parallel group.
        ranks: size of the data-parallel group.

    Raises:
        UserError: no micro-batch is left for all ranks.
    """

    def __init__(self, total_samples: int, consumed_samples: int, micro_batch_size: int, rank: int, ranks: int):
        assert 0 <= rank < ranks and micro_batch_size > 0 and consumed_samples >= 0
        self.total_samples, self.micro_batch_size = total_samples, micro_batch_size
        self.rank, self.ranks, self.consumed_samples = rank, ranks, consumed_samples
        if len(self) == 0:
            raise UserError(
                f"{consumed_samples} of {total_samples} samples are consumed, and a micro-batch on {ranks} "
                f"data-parallel rank(s) takes {micro_batch_size * ranks}: none is left. Ask for more samples, or use "
                "fewer ranks or a smaller micro-batch"
            )

    def __len__(self) -> int:
        """Micro-batches left from the present position."""
        return max(self.total_samples - self.consumed_samples, 0) // (self.micro_batch_size * self.ranks)

    def __iter__(self) -> Iterator[range]:
        """Sample numbers of this rank's next micro-batches, B each; the position moves as each is handed out."""
        for _ in range(len(self)):
            begin = self.consumed_samples + self.rank * self.micro_batch_size
            self.consumed_samples += self.micro_batch_size * self.ranks
            yield range(begin, begin + self.micro_batch_size)


def read_batches(dataset, sampler: BatchSampler) -> Iterator[np.ndarray]:
    """int64 [B, S + 1] token arrays, one per micro-batch of `sampler`, from a dataset of `build_datasets`."""
    for samples in sampler:
        yield np.stack([dataset[i] for i in samples])
