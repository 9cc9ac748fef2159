"""Fixed-length training samples from one shard, in exactly Megatron's order.

The documents of every epoch are shuffled and laid end to end; sample k is the S + 1 tokens that begin at token k·S of
that stream; the samples are then drawn in a shuffled order. The three indices are built in memory from the shard's
lengths alone, so every rank gets the same order from the same numbers, without a cache or a barrier.
"""

import numpy as np

from megatron_xmod.data.indexed import IndexedDataset
from megatron_xmod.errors import UserError

LAST_EPOCH_SHARE = 0.80  # a last epoch used less than this is shuffled apart, so that no document comes too often


def count_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """The fewest epochs whose tokens hold `num_samples` samples of `seq_length` + 1 overlapping by one."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def count_samples(tokens_per_epoch: int, seq_length: int, epochs: int) -> int:
    """Whole samples in `epochs` epochs."""
    return (epochs * tokens_per_epoch - 1) // seq_length


def build_document_index(sequences: range, epochs: int, last_apart: bool, rng: np.random.RandomState) -> np.ndarray:
    """int32 [epochs · N]: the ids in `sequences`, once per epoch, shuffled (the last epoch by itself if apart)."""
    together = epochs - 1 if last_apart else epochs
    parts = []
    for count in (together, epochs - together):
        part = np.tile(np.arange(sequences.start, sequences.stop, dtype=np.int32), count)
        rng.shuffle(part)
        parts.append(part)
    return np.concatenate(parts)


def build_sample_index(lengths: np.ndarray, document_index: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """[samples + 1, 2]: row k is the position in `document_index`, and the offset there, of token k·S of the stream."""
    per_document = lengths[document_index]
    starts = np.zeros(len(document_index) + 1, dtype=np.int64)
    np.cumsum(per_document, out=starts[1:])
    largest = max(len(document_index), int(per_document.max()))
    index = np.empty((samples + 1, 2), dtype=np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    targets = np.arange(samples + 1, dtype=np.int64) * seq_length
    position = np.searchsorted(starts, targets, side="right") - 1
    position[0] = 0  # Megatron starts at the very first document even when it is empty
    index[:, 0] = position
    index[:, 1] = targets - starts[position]
    return index


def build_shuffle_index(samples: int, whole: int, rng: np.random.RandomState) -> np.ndarray:
    """The sample ids [0, whole) and then [whole, samples), each range shuffled."""
    dtype = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(samples, dtype=dtype)
    rng.shuffle(index[:whole])
    if whole < samples:
        rng.shuffle(index[whole:])
    return index


class GPTDataset:
    """At least `num_samples` samples of S + 1 tokens from some sequences of a shard.

    Args:
        shard: the tokens.
        sequences: the ids of the shard's sequences (its documents) that belong to this split.
        seq_length: S, tokens the model sees; a sample has one more, for the labels.
        num_samples: samples needed, over as many epochs as that takes; None means one epoch.
        seed: of the shuffles.

    Raises:
        UserError: the split is empty or too small for one sample.
    """

    def __init__(self, shard: IndexedDataset, sequences: range, seq_length: int, num_samples: int | None, seed: int):
        self.shard, self.sequences, self.seq_length = shard, sequences, seq_length
        tokens = int(shard.lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        if tokens == 0:
            raise UserError(
                f"{shard.prefix}: this split has no tokens (documents {sequences.start} to {sequences.stop} of "
                f"{len(shard)}); change data.split or give a shard with more documents"
            )
        epochs = 1 if num_samples is None else count_epochs(tokens, seq_length, num_samples)
        samples = count_samples(tokens, seq_length, epochs)
        if samples == 0:
            raise UserError(
                f"{shard.prefix}: this split has {tokens} tokens, too few for one sample of {seq_length} + 1; "
                "give more text, change data.split or lower data.seq_length"
            )
        whole = samples
        if epochs > 1:
            before_last = count_samples(tokens, seq_length, epochs - 1)
            per_epoch = count_samples(tokens, seq_length, 1)
            if num_samples - before_last < int(LAST_EPOCH_SHARE * per_epoch):
                whole = before_last
        last_apart = whole < samples
        rng = np.random.RandomState(seed)
        self.epochs = epochs
        self.document_index = build_document_index(sequences, epochs, last_apart, rng)
        self.sample_index = build_sample_index(shard.lengths, self.document_index, seq_length, samples)
        self.shuffle_index = build_shuffle_index(samples, whole, rng)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """int64 [S + 1]: the tokens of sample `index`.

        Raises:
            IndexError: `index` is not in `[0, len(self))`.
            UserError: a token lies outside the vocabulary, where one was set.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = int(self.shuffle_index[index])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        parts = []
        for position in range(first, last + 1):
            start = begin if position == first else 0
            stop = end + 1 if position == last else None
            parts.append(self.shard.read(int(self.document_index[position]), start, stop))
        return np.concatenate(parts, dtype=np.int64)
