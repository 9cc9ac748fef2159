"""Splits, blends and errors of `build_datasets`."""

import math

import numpy as np
import pytest

from megatron_xmod.data.build import build_datasets, parse_split
from megatron_xmod.data.indexed import IndexedDatasetWriter
from megatron_xmod.errors import UserError


def make_shard(path, documents, length=10, first=0):
    with IndexedDatasetWriter(path, np.int32) as writer:
        writer.add_documents(np.arange(first, first + documents * length), [length] * documents)
    return str(path)


def test_parse_split():
    assert parse_split("1,1,2") == [(0, 0.25), (0.25, 0.5), (0.5, 1)]
    assert parse_split("100") == [(0, 1), None, None]
    assert parse_split("9,0,1") == [(0, 0.9), None, (0.9, 1)]


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "1;2"])
def test_parse_split_refuses(split):
    with pytest.raises(UserError, match="data.split"):
        parse_split(split)


def test_splits_share_no_document(tmp_path):
    path = make_shard(tmp_path / "a", 100)
    train, valid, test = build_datasets([path], None, "80,10,10", 7, 1234, (200, 30, 5))
    documents = [set(dataset.document_index) for dataset in (train, valid, test)]
    assert documents == [set(range(80)), set(range(80, 90)), set(range(90, 100))]
    assert (len(train) >= 200, len(valid) >= 30, len(test) >= 5) == (True, True, True)
    assert all(len(train[i]) == 8 for i in range(len(train)))


def test_no_samples_no_dataset(tmp_path):
    path = make_shard(tmp_path / "a", 100)
    train, valid, test = build_datasets([path], None, "9,1", 7, 1, (10, 0, 0))
    assert len(train) >= 10 and valid is None and test is None


def test_blend_by_weight_over_epochs(tmp_path):
    paths = [make_shard(tmp_path / "a", 20), make_shard(tmp_path / "b", 20, first=1000)]
    train, _, _ = build_datasets(paths, [3, 1], "100", 9, 1234, (400, 0, 0))
    assert len(train) == 400
    from_b = sum(train[i][0] >= 1000 for i in range(400))
    assert from_b == 100


def test_blend_by_size_is_one_epoch_while_that_is_enough(tmp_path):
    paths = [make_shard(tmp_path / "a", 30), make_shard(tmp_path / "b", 10, first=1000)]
    train, _, _ = build_datasets(paths, None, "100", 9, 1234, (40, 0, 0))
    assert [dataset.epochs for dataset in train.datasets] == [1, 1]
    assert sum(train[i][0] >= 1000 for i in range(40)) == 10
    train, _, _ = build_datasets(paths, None, "100", 9, 1234, (400, 0, 0))
    assert len(train) >= 400 and all(dataset.epochs > 1 for dataset in train.datasets)


def test_many_small_parts_never_run_out(tmp_path):
    paths = [make_shard(tmp_path / str(i), 3, length=5) for i in range(60)]
    weights = [60.0] + [0.01 * (i + 1) for i in range(59)]
    train, _, _ = build_datasets(paths, weights, "100", 13, 1, (65, 0, 0))
    assert len(train) == sum(math.ceil(65 * weight / sum(weights)) for weight in weights)
    assert all(len(train[i]) == 14 for i in range(len(train)))


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, math.nan]])
def test_bad_weights(tmp_path, weights):
    with pytest.raises(UserError, match="data.weights"):
        build_datasets([make_shard(tmp_path / name, 3) for name in "ab"], weights, "1", 4, 1, (5, 0, 0))


def test_bad_requests(tmp_path):
    path = make_shard(tmp_path / "a", 4)
    with pytest.raises(UserError, match="data.paths is empty"):
        build_datasets([], None, "1", 4, 1, (5, 0, 0))
    with pytest.raises(UserError, match="gives nothing to valid"):
        build_datasets([path], None, "1", 4, 1, (5, 5, 0))
    with pytest.raises(UserError, match=r"valid split: .*a: this split has no tokens \(documents 4 to 4 of 4\)"):
        build_datasets([path], None, "99,1", 4, 1, (5, 5, 0))
    with pytest.raises(UserError, match="train split: .*data.seq_length"):
        build_datasets([path, path], None, "1", 100, 1, (5, 0, 0))


def test_vocabulary(tmp_path):
    path = make_shard(tmp_path / "a", 4)
    build_datasets([path], None, "1", 4, 1, (5, 0, 0), vocab_size=40)
    with pytest.raises(UserError, match="document 3 holds token id 39"):
        build_datasets([path], None, "1", 4, 1, (5, 0, 0), vocab_size=39)
