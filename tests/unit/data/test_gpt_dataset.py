"""Sample order of one shard, against its definition written the slow way."""

import numpy as np
import pytest

from megatron_xmod.data.gpt_dataset import GPTDataset, build_sample_index, build_shuffle_index, count_epochs
from megatron_xmod.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_xmod.errors import UserError


def make_shard(path, lengths):
    """Token number t of the shard is t."""
    with IndexedDatasetWriter(path, np.int32) as writer:
        writer.add_documents(np.arange(sum(lengths)), lengths)
    return IndexedDataset(path)


@pytest.fixture
def shard(tmp_path):
    return make_shard(tmp_path / "shard", np.random.RandomState(0).randint(0, 12, size=50))


@pytest.mark.parametrize(("seq_length", "num_samples"), [(4, 10), (4, None), (3, 500), (40, 13), (200, 3)])
def test_samples_are_windows_of_the_shuffled_documents(shard, seq_length, num_samples):
    dataset = GPTDataset(shard, range(5, 45), seq_length, num_samples, seed=3)
    stream = np.concatenate([shard[i] for i in dataset.document_index])
    assert len(dataset) >= (num_samples or 1)
    assert len(dataset) == (len(stream) - 1) // seq_length
    assert sorted(dataset.shuffle_index) == list(range(len(dataset)))
    for i in range(len(dataset)):
        start = int(dataset.shuffle_index[i]) * seq_length
        sample = dataset[i]
        assert sample.dtype == np.int64
        assert sample.tolist() == stream[start : start + seq_length + 1].tolist()


def test_every_epoch_holds_every_document_once(shard):
    dataset = GPTDataset(shard, range(50), 4, 400, seed=1)
    assert dataset.epochs > 1
    assert np.bincount(dataset.document_index).tolist() == [dataset.epochs] * 50


def test_a_last_epoch_that_is_little_used_is_shuffled_apart(tmp_path):
    shard = make_shard(tmp_path / "shard", [10] * 10)  # 100 tokens an epoch, 9 samples of 10 + 1
    apart = GPTDataset(shard, range(10), 10, 10, seed=0)
    assert sorted(apart.document_index[:10]) == list(range(10))
    assert sorted(apart.shuffle_index[:9]) == list(range(9))
    mixed = GPTDataset(shard, range(10), 10, 16, seed=0)
    assert len(mixed) == len(apart) == 19
    assert sorted(mixed.document_index[:10]) != list(range(10))


def test_epochs_are_as_few_as_hold_the_samples():
    assert [count_epochs(100, 10, n) for n in (0, 9, 10, 19, 20)] == [1, 1, 2, 2, 3]


def test_order_depends_on_the_seed_alone(shard):
    def order(seed):
        return [GPTDataset(shard, range(50), 4, 30, seed)[i].tolist() for i in range(30)]

    assert order(1) == order(1) != order(2)


def test_leading_empty_documents_are_passed_over():
    index = build_sample_index(np.array([0, 0, 3, 0, 4], np.int32), np.arange(5, dtype=np.int32), 3, 2)
    assert index.tolist() == [[0, 0], [4, 0], [4, 3]]


def test_shuffle_index_keeps_the_last_epoch_apart():
    index = build_shuffle_index(100, 70, np.random.RandomState(0))
    assert index.dtype == np.uint32
    assert sorted(index[:70]) == list(range(70)) and sorted(index) == list(range(100))


def test_split_without_tokens(shard):
    with pytest.raises(UserError, match="no tokens"):
        GPTDataset(shard, range(50, 50), 4, 10, 0)


def test_too_little_text_for_a_sample(shard):
    with pytest.raises(UserError, match="too few for one sample of 5000"):
        GPTDataset(shard, range(50), 5000, None, 0)


@pytest.mark.parametrize("index", [-1, 10**6])
def test_index_out_of_range(shard, index):
    with pytest.raises(IndexError):
        GPTDataset(shard, range(50), 4, 10, 0)[index]
