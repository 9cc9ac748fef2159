"""Text to shard: what is written, what is left out, workers that fail."""

import gzip
import json
import time

import numpy as np
import pytest
import zstandard

from megatron_xmod.data import corpus
from megatron_xmod.data.indexed import IndexedDataset
from megatron_xmod.data.preprocess import TokenizerSpec, make_tasks, preprocess
from megatron_xmod.data.tokenizer import BytesTokenizer
from megatron_xmod.errors import UserError

BYTES = TokenizerSpec("bytes")


def documents(prefix):
    """Texts of a shard of bytes, each of which must end with the end-of-document id."""
    shard = IndexedDataset(prefix)
    assert all(shard[i][-1] == BytesTokenizer.eod for i in range(len(shard)))
    return [BytesTokenizer().decode(shard[i].tolist()) for i in range(len(shard))]


def lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def corpus_folder(tmp_path):
    """Eight documents in five files, their texts in the order of the input."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.py").write_text("def a():\n\treturn 1\n")
    (folder / "b.jsonl").write_bytes(lines("one", "zwei ü"))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines("three")))
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress(lines("four", "five\n")))
    (folder / "e.txt.gz").write_bytes(gzip.compress(b"six"))
    (folder / "f.md").write_text("# seven\n")
    return folder


TEXTS = ["def a():\n\treturn 1\n", "one", "zwei ü", "three", "four", "five\n", "six", "# seven\n"]


@pytest.mark.parametrize("workers", [1, 2])
def test_all_kinds_of_files_in_order(corpus_folder, tmp_path, workers):
    summary = preprocess([str(corpus_folder)], str(tmp_path / "out"), BYTES, workers=workers)
    assert documents(tmp_path / "out") == TEXTS
    assert IndexedDataset(tmp_path / "out").dtype == np.uint16
    size = sum(len(text.encode()) for text in TEXTS)
    assert (summary.documents, summary.text_bytes, summary.tokens) == (8, size, size + 8)
    assert "8 documents" in str(summary) and "tokens/s" in str(summary)


def test_order_does_not_depend_on_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 2000)
    rng = np.random.RandomState(0)
    for name in ("a", "b"):
        texts = [f"{name}{i} " + "x" * rng.randint(3000) for i in range(150)]
        (tmp_path / f"{name}.jsonl").write_bytes(lines(*texts))
    files = []
    for workers in (1, 3):
        preprocess([str(tmp_path / "*.jsonl")], str(tmp_path / f"out{workers}"), BYTES, workers=workers)
        files.append([(tmp_path / f"out{workers}{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert files[0] == files[1]
    assert len(IndexedDataset(tmp_path / "out1")) == 300


def test_long_text_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 100)
    monkeypatch.setattr(corpus, "READ_BYTES", 30)
    text = "a line\n" * 500
    (tmp_path / "a.txt").write_text(text)
    preprocess([str(tmp_path / "a.txt")], str(tmp_path / "out"), BYTES)
    assert documents(tmp_path / "out") == [text]


def test_without_end_of_document(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    preprocess([str(tmp_path / "a.txt")], str(tmp_path / "out"), BYTES, append_eod=False)
    assert IndexedDataset(tmp_path / "out")[0].tolist() == [97, 98]


def test_small_files_share_a_task(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text("x" * 100_000)
    tasks = list(make_tasks(corpus.find_files([str(tmp_path)]), "auto"))
    assert [len(task.paths) for task in tasks] == [11, 11, 8]
    assert sum(task.disk_bytes for task in tasks) == 3_000_000


BAD = b"\n".join(
    [b'{"text": "good"}', b"", b'{"text": ', b'{"other": 1}', b'{"text": "\xff"}', b'{"text": ""}', b'{"text": "end"}']
)


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_documents_are_counted_and_named(tmp_path, capsys, workers):
    (tmp_path / "a.jsonl").write_bytes(BAD)
    (tmp_path / "b.txt").write_bytes(b"a\0b")
    (tmp_path / "c.txt").write_bytes(b"fine\n\xff\n")
    summary = preprocess([str(tmp_path)], str(tmp_path / "out"), BYTES, workers=workers)
    assert documents(tmp_path / "out") == ["good", "end"]
    assert summary.text_bytes == 7
    assert dict(summary.skipped) == {
        "empty line": 1, "broken JSON": 1, "no text under the key 'text'": 1, "invalid UTF-8": 2, "empty document": 1,
        "binary file": 1,
    }
    shown = capsys.readouterr().err
    for line, reason in [(2, "empty line"), (3, "broken JSON"), (4, "no text"), (5, "invalid UTF-8"), (6, "empty doc")]:
        assert f"skipped {tmp_path / 'a.jsonl'}:{line}: {reason}" in shown
    assert f"{tmp_path / 'c.txt'}:2: invalid UTF-8" in shown
    assert "skipped 2: invalid UTF-8" in str(summary)


def test_many_bad_documents_are_not_all_shown(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b"x\n" * 500 + lines("good"))
    summary = preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), BYTES)
    assert summary.skipped["broken JSON"] == 500
    assert capsys.readouterr().err.count("a.jsonl:") == 20


@pytest.mark.parametrize("workers", [1, 2])
def test_strict_refuses_and_leaves_the_old_shard(tmp_path, workers):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "a.jsonl").write_bytes(BAD)
    preprocess([str(tmp_path / "good.txt")], str(tmp_path / "out" / "shard"), BYTES)
    with pytest.raises(UserError, match=r"a\.jsonl:2: empty line .*--strict"):
        preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "out" / "shard"), BYTES, strict=True, workers=workers)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["shard.bin", "shard.idx"]
    assert documents(tmp_path / "out" / "shard") == ["good"]


def test_nothing_usable(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x\n")
    with pytest.raises(UserError, match="no document could be used.*broken JSON"):
        preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), BYTES)
    assert not list(tmp_path.glob("*out*"))


def test_damaged_archive_ends_the_job(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines("one"))[:-4])
    with pytest.raises(UserError, match="truncated or damaged"):
        preprocess([str(tmp_path / "a.jsonl.gz")], str(tmp_path / "out"), BYTES, workers=2)


def test_zero_workers(tmp_path):
    with pytest.raises(UserError, match="--workers"):
        preprocess([str(tmp_path)], str(tmp_path / "out"), BYTES, workers=0)


FAILING = """
import os, signal, time
from megatron_xmod.data.preprocess import TokenizerSpec
from megatron_xmod.data.tokenizer import BytesTokenizer

class Tokenizer(BytesTokenizer):
    def encode(self, text):
        if text == "fail":
            raise RuntimeError("no such piece")
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "slow":
            time.sleep(100)
        return super().encode(text)

class Spec(TokenizerSpec):
    def load(self):
        return Tokenizer()
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [("fail", r"b\.jsonl from line 1 failed: RuntimeError: no such piece"), ("die", "a worker process died")],
)
def test_failing_worker_ends_the_job_quickly(tmp_path, monkeypatch, text, message):
    (tmp_path / "failing_tokenizer.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)  # workers get the same path
    import failing_tokenizer

    (tmp_path / "a.jsonl").write_bytes(lines("good"))
    (tmp_path / "b.jsonl").write_bytes(lines(text))
    (tmp_path / "c.jsonl").write_bytes(lines("slow"))
    started = time.monotonic()
    with pytest.raises(UserError, match=message):
        preprocess([str(tmp_path)], str(tmp_path / "out"), failing_tokenizer.Spec("bytes"), workers=2)
    assert time.monotonic() - started < 20
    assert not list(tmp_path.glob("*out*"))
