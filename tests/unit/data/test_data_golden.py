"""Shards, sample order, splits and blends equal megatron-core's, as tests/golden/make_data_golden.py recorded them."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_xmod.data.build import build_datasets
from megatron_xmod.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "data.npz", allow_pickle=False)
CASES = json.loads(str(GOLDEN["cases"]))


@pytest.fixture
def folder(tmp_path):
    for name in CASES["shards"]:
        for suffix in ("bin", "idx"):
            GOLDEN[f"{name}.{suffix}"].tofile(tmp_path / f"{name}.{suffix}")
    return tmp_path


@pytest.mark.parametrize("name", CASES["shards"])
def test_writing_a_shard_again_gives_the_same_bytes(folder, name):
    shard = IndexedDataset(folder / name)
    vocab_size = CASES["shards"][name][0]
    assert shard.dtype == token_dtype(vocab_size)
    with IndexedDatasetWriter(folder / "again", token_dtype(vocab_size)) as writer:
        for document in range(len(shard)):
            writer.add_documents(shard[document].astype(np.int64), [len(shard[document])])
    for suffix in ("bin", "idx"):
        assert (folder / f"again.{suffix}").read_bytes() == GOLDEN[f"{name}.{suffix}"].tobytes()


@pytest.mark.parametrize("number", range(len(CASES["orders"])))
def test_sample_order(folder, number):
    name, *rest = CASES["orders"][number]
    for split, dataset in enumerate(build_datasets([str(folder / name)], None, *rest)):
        for index in ("document_index", "sample_index", "shuffle_index"):
            key = f"order{number}.{split}.{index}"
            assert (dataset is not None) == (key in GOLDEN)
            if dataset is not None:
                mine = getattr(dataset, index)
                assert mine.dtype == GOLDEN[key].dtype
                np.testing.assert_array_equal(mine, GOLDEN[key])


@pytest.mark.parametrize("number", range(len(CASES["blends"])))
def test_blend(folder, number):
    names, *rest = CASES["blends"][number]
    for split, dataset in enumerate(build_datasets([str(folder / name) for name in names], *rest)):
        assert (dataset is not None) == (f"blend{number}.{split}.dataset_index" in GOLDEN)
        if dataset is not None:
            np.testing.assert_array_equal(dataset.dataset_index, GOLDEN[f"blend{number}.{split}.dataset_index"])
            np.testing.assert_array_equal(dataset.sample_index, GOLDEN[f"blend{number}.{split}.sample_index"])
            first_tokens = [dataset[i][0] for i in range(len(dataset))]
            np.testing.assert_array_equal(first_tokens, GOLDEN[f"blend{number}.{split}.first_tokens"])
