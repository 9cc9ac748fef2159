"""Shards: bytes on disk, checks at open, atomic writing, merging."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_xmod.data.indexed import IndexedDataset, IndexedDatasetWriter, merge_shards, token_dtype
from megatron_xmod.errors import UserError

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_documents(np.array(document, dtype=np.int64), [len(document)])
    return str(prefix)


def test_bytes_on_disk(tmp_path):
    prefix = write(tmp_path / "shard")
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<8H", *range(1, 9))
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected += struct.pack("<4i", 3, 0, 1, 4) + struct.pack("<4q", 0, 6, 6, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert Path(prefix + ".idx").read_bytes() == expected


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint16, np.int64])
def test_reads_what_was_written(tmp_path, dtype):
    shard = IndexedDataset(write(tmp_path / "a.b" / "shard", dtype=dtype))
    assert len(shard) == 4 and shard.dtype == dtype
    assert [shard[i].tolist() for i in range(4)] == DOCUMENTS
    assert shard.read(3, 1, 3).tolist() == [6, 7]
    assert shard.document_ends.tolist() == [0, 1, 2, 3, 4]


def test_several_documents_at_once_give_the_same_files(tmp_path):
    one = write(tmp_path / "one")
    with IndexedDatasetWriter(tmp_path / "two", np.uint16) as writer:
        writer.add_documents(np.arange(1, 5), [3, 0, 1])
        writer.add_documents(np.arange(5, 9), [4])
    for suffix in (".bin", ".idx"):
        assert Path(one + suffix).read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_token_dtype_changes_where_megatron_changes_it():
    assert (token_dtype(65499), token_dtype(65500)) == (np.uint16, np.int32)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(tmp_path, suffix):
    prefix = write(tmp_path / "shard")
    Path(prefix + suffix).unlink()
    with pytest.raises(UserError, match=rf"shard\{suffix} does not exist"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("cut", [1, 8])
def test_truncated_file(tmp_path, suffix, cut):
    prefix = write(tmp_path / "shard")
    data = Path(prefix + suffix).read_bytes()
    Path(prefix + suffix).write_bytes(data[:-cut])
    with pytest.raises(UserError, match=rf"shard\{suffix} is truncated.*copy"):
        IndexedDataset(prefix)


def test_bin_longer_than_its_index(tmp_path):
    prefix = write(tmp_path / "shard")
    with open(prefix + ".bin", "ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(UserError, match="longer than its index"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "not a Megatron index"),
        (9, b"\2", "version 2"),
        (17, b"\7", "dtype code 7"),
        (34, struct.pack("<i", -3), "lengths and offsets disagree"),
        (34 + 16 + 8, struct.pack("<q", 4), "lengths and offsets disagree"),
        (34 + 48 + 8, struct.pack("<q", 3), "document ends"),
    ],
)
def test_damaged_index(tmp_path, offset, value, message):
    prefix = write(tmp_path / "shard")
    data = bytearray(Path(prefix + ".idx").read_bytes())
    data[offset : offset + len(value)] = value
    Path(prefix + ".idx").write_bytes(data)
    with pytest.raises(UserError, match=message):
        IndexedDataset(prefix)


def test_index_of_a_few_bytes(tmp_path):
    prefix = write(tmp_path / "shard")
    Path(prefix + ".idx").write_bytes(b"MMIDIDX")
    with pytest.raises(UserError, match="truncated: 7 bytes"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("documents", "message"), [([], "no document"), ([[], []], "no token")])
def test_empty_shard(tmp_path, documents, message):
    with pytest.raises(UserError, match=message):
        IndexedDataset(write(tmp_path / "shard", documents))


def test_vocabulary_is_checked_at_once_in_small_shards(tmp_path):
    shard = IndexedDataset(write(tmp_path / "shard"))
    shard.limit_vocabulary(9)
    with pytest.raises(UserError, match=r"shard\.bin: document 3 holds token id 7, outside the vocabulary of 7"):
        shard.limit_vocabulary(7)


def test_vocabulary_is_checked_on_reading_in_large_shards(tmp_path):
    tokens = np.zeros(20_000_000, dtype=np.uint16)
    tokens[123_456] = 300
    with IndexedDatasetWriter(tmp_path / "shard", np.uint16) as writer:
        writer.add_documents(tokens, [100_000] * 200)
    shard = IndexedDataset(tmp_path / "shard")
    shard.limit_vocabulary(300)  # the scan in blocks passes it by
    shard.read(1, 0, 23_456)
    with pytest.raises(UserError, match="document 1 holds token id 300"):
        shard.read(1, 0, 23_457)


def test_negative_token(tmp_path):
    shard = IndexedDataset(write(tmp_path / "shard", [[1, -2]], np.int32))
    with pytest.raises(UserError, match="token id -2"):
        shard.limit_vocabulary(10)


def test_nothing_appears_after_an_error_and_the_old_shard_stays(tmp_path):
    prefix = write(tmp_path / "shard")
    with pytest.raises(RuntimeError), IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_documents(np.array([9]), [1])
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.bin", "shard.idx"]
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]


FILL_DISK = """
import resource, signal, sys
import numpy as np
from megatron_xmod.data.indexed import IndexedDatasetWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
with IndexedDatasetWriter(sys.argv[1], np.uint16) as writer:
    for _ in range(3):
        writer.add_documents(np.zeros(1_000_000, np.uint16), [1_000_000])
"""


def test_full_disk_is_one_message_and_leaves_the_old_shard(tmp_path):
    """A limit on the size of files stands in for a full disk."""
    prefix = write(tmp_path / "shard")
    run = subprocess.run([sys.executable, "-c", FILL_DISK, prefix], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert f"cannot write {prefix}.bin: File too large" in run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.bin", "shard.idx"]
    assert len(IndexedDataset(prefix)) == 4


def test_merge_appends_shards(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", [[9, 9], [7]])
    merge_shards([first, second], tmp_path / "both")
    direct = write(tmp_path / "direct", [*DOCUMENTS, [9, 9], [7]])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"both{suffix}").read_bytes() == Path(direct + suffix).read_bytes()


def test_merge_refuses_two_tokenizers(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", dtype=np.int32)
    with pytest.raises(UserError, match="one tokenizer"):
        merge_shards([first, second], tmp_path / "both")
    assert not (tmp_path / "both.bin").exists()
