"""Shards, sample order, splits and blends against megatron-core itself, on random cases.

Runs where megatron-core is installed; tests/unit/data/test_data_golden.py holds the same claims elsewhere, on recorded
cases. Its torch and ours need not be the same: the data side uses none.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from megatron_xmod.data.build import build_datasets
from megatron_xmod.data.indexed import IndexedDataset, IndexedDatasetWriter, merge_shards, token_dtype

pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megatron-core)")

MAKER = Path(__file__).parents[1] / "golden" / "make_data_golden.py"


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The golden script's module, inside the one-process group that megatron-core's blends need."""
    import torch

    spec = importlib.util.spec_from_file_location("make_data_golden", MAKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield module
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("vocab_size", [2, 65499, 65500, 150_000])
def test_same_bytes(tmp_path, peer, vocab_size):
    peer.write_shard(f"{tmp_path}/theirs", vocab_size, 80, 1)
    with IndexedDatasetWriter(tmp_path / "ours", token_dtype(vocab_size)) as writer:
        for document in peer.shard_documents(vocab_size, 80, 1):
            writer.add_documents(document, [len(document)])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_each_reads_the_others_shard(tmp_path, peer):
    from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirDataset

    peer.write_shard(f"{tmp_path}/theirs", 300, 30, 5)
    merge_shards([f"{tmp_path}/theirs"] * 2, tmp_path / "ours")
    ours, theirs = IndexedDataset(tmp_path / "theirs"), TheirDataset(f"{tmp_path}/ours")
    assert len(theirs) == 2 * len(ours)
    for i in range(len(ours)):
        assert ours[i].tolist() == theirs[i].tolist() == theirs[i + len(ours)].tolist()


def test_merge_equals_theirs(tmp_path, peer):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for seed in (1, 2):
        peer.write_shard(f"{tmp_path}/{seed}", 300, 30, seed)
    builder = IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=np.uint16)
    for seed in (1, 2):
        builder.add_index(f"{tmp_path}/{seed}")
    builder.finalize(f"{tmp_path}/theirs.idx")
    merge_shards([f"{tmp_path}/1", f"{tmp_path}/2"], tmp_path / "ours")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


@pytest.mark.parametrize("case", range(40))
def test_same_samples(tmp_path, peer, case):
    """Random shards, splits, lengths, seeds and counts; every token of every sample."""
    rng = np.random.RandomState(case)
    names = [str(i) for i in range(1 if case % 2 else rng.randint(2, 6))]
    for seed, name in enumerate(names):
        peer.write_shard(f"{tmp_path}/{name}", 1000, rng.randint(40, 200), case + seed)
    weights = None if len(names) == 1 or case % 4 == 0 else (rng.rand(len(names)) + 0.05).tolist()
    split = ["80,10,10", "1,1,1", "969,150,150", "0.7,0.2,0.1"][rng.randint(4)]
    by_size = len(names) > 1 and weights is None
    counts = [int(rng.randint(1, 10 if by_size else limit)) for limit in (600, 60, 60)]
    arguments = (split, int(rng.randint(2, 25 if by_size else 80)), int(rng.randint(1, 10**6)), counts)
    theirs = peer.build(tmp_path, names, weights, *arguments)
    ours = build_datasets([f"{tmp_path}/{name}" for name in names], weights, *arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other)
        for i in range(len(mine)):
            sample = other[i]
            np.testing.assert_array_equal(mine[i][:-1], sample["tokens"])
            np.testing.assert_array_equal(mine[i][1:], sample["labels"])
