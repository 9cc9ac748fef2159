"""From data paths to the train, validation and test datasets."""

import math
from collections.abc import Sequence

import numpy as np

from megatron_xmod.data.blend import BlendedDataset, blending_indices, normalize
from megatron_xmod.data.gpt_dataset import GPTDataset
from megatron_xmod.data.indexed import IndexedDataset
from megatron_xmod.errors import UserError

SPLITS = ("train", "valid", "test")
SURPLUS = 0.005  # Megatron asks every dataset of a blend for this share more than its weight gives


def parse_split(split: str) -> list[tuple[float, float] | None]:
    """Parse "969,30,1" into the share of the documents each of train, valid and test takes.

    Returns:
        One (begin, end) in [0, 1] per split, None for a split of size 0.

    Raises:
        UserError: not one to three non-negative numbers with a positive sum.
    """
    message = f'data.split is {split!r}; write the shares of train, valid and test like "969,30,1"'
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError as error:
        raise UserError(message) from error
    numbers = all(math.isfinite(share) and share >= 0 for share in shares)
    if len(shares) > len(SPLITS) or not numbers or sum(shares) == 0:
        raise UserError(message)
    edges = [0.0]
    for share in normalize(shares + [0.0] * (len(SPLITS) - len(shares))).tolist():
        edges.append(edges[-1] + share)
    pairs = zip(edges[:-1], edges[1:], strict=True)
    return [(begin, end) if begin < end else None for begin, end in pairs]


def build_datasets(
    paths: Sequence[str],
    weights: Sequence[float] | None,
    split: str,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    vocab_size: int | None = None,
) -> tuple:
    """Build the train, validation and test datasets, in exactly Megatron's sample order.

    Several paths with weights are blended by weight, over as many epochs as needed. Without weights they are blended by
    their size: one epoch of each, or more in the same proportion if that is not enough.

    Args:
        paths: prefixes of the shards, without `.bin` / `.idx`.
        weights: one positive number per path, or None.
        split: see `parse_split`; the documents of each shard are cut in order.
        seq_length: S, tokens; a sample has S + 1.
        seed: of the document and sample shuffles.
        num_samples: samples needed per split; 0 builds nothing.
        vocab_size: V; token ids outside it are refused, at once where a scan in blocks meets them (small shards are
            scanned whole), otherwise when a sample that holds one is read.

    Returns:
        (train, valid, test): each with `len` (at least what was asked) and `[i]` -> int64 [S + 1]; None for a split
        of which 0 samples were asked.

    Raises:
        UserError: a shard can't be read, or a split has too little text; the message names shard and split.
    """
    shares = parse_split(split)
    _check_paths(paths, weights)
    shards = [IndexedDataset(path) for path in paths]
    for shard in shards if vocab_size is not None else []:
        shard.limit_vocabulary(vocab_size)
    datasets = []
    for name, share, samples in zip(SPLITS, shares, num_samples, strict=True):
        if samples and share is None:
            raise UserError(f"data.split {split!r} gives nothing to {name}, but {samples} {name} samples are needed")
        built = _build_split(name, shards, weights, share, seq_length, seed, samples) if samples else None
        datasets.append(built)
    return tuple(datasets)


def _check_paths(paths: Sequence[str], weights: Sequence[float] | None) -> None:
    if not paths:
        raise UserError("data.paths is empty; name at least one shard (its path without .bin and .idx)")
    if weights is None:
        return
    if len(weights) != len(paths) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(
            f"data.weights is {list(weights)} for {len(paths)} data.paths; give one number above 0 per path "
            "(leave a path out instead of giving it 0), or null to blend by size"
        )


def _build_split(name, shards, weights, share, seq_length, seed, samples):
    def build(shard: IndexedDataset, count: int | None) -> GPTDataset:
        sequences = range(*(int(round(edge * len(shard))) for edge in share))
        try:
            return GPTDataset(shard, sequences, seq_length, count, seed)
        except UserError as error:
            raise UserError(f"{name} split: {error}") from error

    if len(shards) == 1 and weights is None:
        return build(shards[0], samples)
    return _blend(shards, weights, samples, build)


def _blend(shards, weights, samples, build) -> BlendedDataset:
    """Blend one dataset per shard, made by `build(shard, number of samples)`."""
    by_size = weights is None
    if by_size:
        datasets = [build(shard, None) for shard in shards]
        weights = [len(dataset) for dataset in datasets]
    if by_size and samples <= sum(weights):
        size = samples
        weights = normalize(weights)
    else:
        weights = normalize(weights)
        parts = [math.ceil(samples * weight) for weight in weights.tolist()]
        size = sum(parts)
        datasets = [build(shard, math.ceil(part * (1 + SURPLUS))) for shard, part in zip(shards, parts, strict=True)]
    dataset_index, sample_index = blending_indices(weights, size)
    drawn = np.bincount(dataset_index, minlength=len(shards)).tolist()
    for i, count in enumerate(drawn):
        if count > len(datasets[i]):  # many small parts can outrun the surplus; Megatron stops here
            datasets[i] = build(shards[i], count)
    return BlendedDataset(datasets, dataset_index, sample_index)
