"""Finding files and reading documents."""

import gzip
import json

import pytest
import zstandard

from megatron_xmod.data import corpus
from megatron_xmod.data.corpus import BadDocument, find_files, has_json_lines, parse_json_line, read_blocks, read_text
from megatron_xmod.errors import UserError


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text\n")


def names(folder, files):
    return [str(path.relative_to(folder)) for path in files]


def test_folders_are_searched_in_order(tmp_path):
    make(tmp_path, "b/z.py", "b/a.txt.gz", "a.md", "c.bin", "U.TXT")
    make(tmp_path, ".hidden/x.py", "b/.x.py", "skip/x.py", "b/test_a.py")
    found = find_files([str(tmp_path)], exclude=["skip", "test_*"])
    assert names(tmp_path, found) == ["U.TXT", "a.md", "b/a.txt.gz", "b/z.py"]
    assert names(tmp_path, find_files([str(tmp_path)], [".bin"])) == ["c.bin"]


def test_files_and_globs_are_taken_whatever_their_ending(tmp_path):
    make(tmp_path, "b/x.odd", "b/c/x.odd", "a.odd")
    found = find_files([str(tmp_path / "a.odd"), str(tmp_path / "**/*.odd"), str(tmp_path / "b/../b/x.odd")])
    assert names(tmp_path, found) == ["a.odd", "b/c/x.odd", "b/x.odd"]


def test_a_name_with_glob_characters_is_a_name_first(tmp_path):
    make(tmp_path, "a[1].txt")
    assert len(find_files([str(tmp_path / "a[1].txt")])) == 1


def test_input_that_matches_nothing(tmp_path):
    make(tmp_path, "a.bin")
    with pytest.raises(UserError, match=r"no\*' matches no text file; check the path$"):
        find_files([str(tmp_path / "no*")])
    with pytest.raises(UserError, match="--extensions"):
        find_files([str(tmp_path)])


def test_format_by_ending(tmp_path):
    endings = [".jsonl", ".jsonl.gz", ".json.zst", ".txt", ".py.gz"]
    assert [has_json_lines(tmp_path / f"a{end}", "auto") for end in endings] == [True, True, True, False, False]
    assert has_json_lines(tmp_path / "a.txt", "jsonl") and not has_json_lines(tmp_path / "a.jsonl", "text")


def compress(data, suffix):
    if suffix == ".zst":
        half = len(data) // 2  # two frames
        return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
    return gzip.compress(data) if suffix == ".gz" else data


@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_blocks_are_whole_lines_with_true_numbers(tmp_path, monkeypatch, suffix, block_bytes):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(corpus, "READ_BYTES", 50)
    lines = [b"x" * (i * 7 % 90) for i in range(200)] + [b"last, without newline"]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(b"\n".join(lines), suffix))
    blocks = list(read_blocks(path))
    assert all(block.data.endswith(b"\n") for block in blocks[:-1])
    assert [pair for block in blocks for pair in block.numbered_lines()] == list(enumerate(lines, 1))
    assert sum(block.disk_bytes for block in blocks) == path.stat().st_size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_damaged_compression(tmp_path, suffix, damage):
    path = tmp_path / f"a.jsonl{suffix}"
    data = compress(bytes(range(256)) * 400, suffix)
    path.write_bytes(data[:-9] if damage == "truncated" else b"garbage" + data)
    with pytest.raises(UserError, match=rf"a\.jsonl\{suffix} is truncated or damaged"):
        list(read_blocks(path))


def test_unreadable_file(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        list(read_blocks(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "empty line"),
        (b" \r", "empty line"),
        (b'{"text": "a', "broken JSON"),
        (b"[" * 100_000, "broken JSON"),
        (b"[1]", "no text under the key 'text'"),
        (b'{"txt": "a"}', "no text under the key 'text'"),
        (b'{"text": 5}', "no text under the key 'text'"),
        (b'{"text": "\xff"}', "invalid UTF-8"),
        (b'{"text": "\\ud800"}', "invalid UTF-8"),
        (b'{"text": " \\n"}', "empty document"),
    ],
)
def test_bad_lines(tmp_path, line, reason):
    with pytest.raises(BadDocument) as caught:
        parse_json_line(line, "text", tmp_path / "a.jsonl", 7)
    assert caught.value.reason == reason
    assert str(caught.value).endswith(f"a.jsonl:7: {reason}")


def test_good_line(tmp_path):
    line = json.dumps({"body": " a\nü "}).encode() + b"\r"
    assert parse_json_line(line, "body", tmp_path, 1) == " a\nü "


def test_text_is_read_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 10)
    monkeypatch.setattr(corpus, "READ_BYTES", 7)
    text = "ü\r\n\tlines  \n\n" * 20
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    pieces = list(read_text(tmp_path / "a.txt"))
    assert "".join(pieces) == text and len(pieces) > 5


@pytest.mark.parametrize(
    ("data", "reason", "line"),
    [(b"", "empty document", 1), (b" \n\n", "empty document", 1), (b"a\0b", "binary file", 1),
     (b"a\nb\n\nc\xff\n", "invalid UTF-8", 4)],
)
def test_bad_files(tmp_path, data, reason, line):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(BadDocument) as caught:
        list(read_text(tmp_path / "a.txt"))
    assert (caught.value.reason, caught.value.line) == (reason, line)
