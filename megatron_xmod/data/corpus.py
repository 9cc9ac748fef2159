"""Finding text files and reading documents from them: JSON Lines or plain text, also compressed with gzip or zstd."""

import codecs
import fnmatch
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

from megatron_xmod.errors import UserError

TEXT_EXTENSIONS = (
    ".txt .text .md .markdown .rst .tex .html .htm .jsonl .ndjson "
    ".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .java .js .jsx .ts .tsx .go .rs .rb .php .cs .swift .kt .scala "
    ".jl .r .lua .pl .sh .sql .hs .ml .lisp .el .f90 .css .toml .yaml .yml"
).split()
LINE_EXTENSIONS = (".jsonl", ".ndjson", ".json")  # one JSON object a line; .json as in Megatron's own tool
COMPRESSIONS = (".gz", ".zst")
BLOCK_BYTES = 1 << 20  # text is read, sent to workers and tokenized in blocks of about this size
READ_BYTES = 1 << 18


class BadDocument(UserError):
    """A document that can't be used: `reason` (a few fixed words), `path`, `line` in the file, from 1."""

    def __init__(self, reason: str, path: Path, line: int):
        super().__init__(f"{path}:{line}: {reason}")
        self.reason, self.path, self.line = reason, path, line

    def __reduce__(self):  # it travels from worker to parent
        return BadDocument, (self.reason, self.path, self.line)


@dataclass(frozen=True)
class Block:
    """Some whole lines of a file: their bytes, the number of the first, and the bytes of disk they took."""

    data: bytes
    first_line: int
    disk_bytes: int

    def numbered_lines(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers and lines, without their newline."""
        if self.data:
            yield from enumerate(self.data.removesuffix(b"\n").split(b"\n"), self.first_line)


def find_files(inputs: list[str], extensions: list[str] | None = None, exclude: list[str] | None = None) -> list[Path]:
    """Files named by `inputs`, each once, in a fixed order: inputs as given, folders and globs sorted by name.

    Args:
        inputs: files, folders (searched through, hidden names left out), or globs (`**` spans folders).
        extensions: endings taken inside folders, with or without .gz / .zst after them; default TEXT_EXTENSIONS.
        exclude: globs of file or folder names to leave out inside folders.

    Raises:
        UserError: an input matches nothing.
    """
    found: dict[Path, Path] = {}  # by true path, so that no file is read twice
    for item in inputs:
        matches = [item] if os.path.exists(item) else sorted(glob.glob(item, recursive=True))
        files = []
        for match in map(Path, matches):
            files += _walk(match, extensions or TEXT_EXTENSIONS, exclude or []) if match.is_dir() else [match]
        if not files:
            raise UserError(
                f"the input {item!r} matches no text file; check the path"
                + (", or name the endings to take with --extensions" if matches else "")
            )
        for path in files:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _walk(folder: Path, extensions: list[str], exclude: list[str]) -> list[Path]:
    def wanted(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatch.fnmatch(name, pattern) for pattern in exclude)

    files = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(filter(wanted, folders))
        paths = (Path(here, name) for name in sorted(filter(wanted, names)))
        files += [path for path in paths if _text_suffix(path) in extensions and path.is_file()]
    return files


def _text_suffix(path: Path) -> str:
    """The ending that tells the kind of text: `.jsonl` of `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix.lower()


def has_json_lines(path: Path, format: str) -> bool:
    """Whether a file is read as JSON Lines; `format` is "jsonl", "text", or "auto" (by its ending)."""
    return format == "jsonl" or (format == "auto" and _text_suffix(path) in LINE_EXTENSIONS)


def read_blocks(path: Path) -> Iterator[Block]:
    """A file's decompressed text in blocks of whole lines, at least BLOCK_BYTES each but the last.

    Raises:
        UserError: the file can't be read, or its compression is damaged.
    """
    line, before, size, parts = 1, 0, 0, []
    try:
        with open(path, "rb", buffering=0) as raw:
            for chunk in _decompress(raw, path.suffix):
                parts.append(chunk)
                size += len(chunk)
                if size < BLOCK_BYTES or b"\n" not in chunk:
                    continue
                head, newline, tail = chunk.rpartition(b"\n")
                data = b"".join([*parts[:-1], head, newline])
                yield Block(data.removeprefix(codecs.BOM_UTF8) if line == 1 else data, line, raw.tell() - before)
                line, before, size, parts = line + data.count(b"\n"), raw.tell(), len(tail), [tail]
            data = b"".join(parts)
            if data or line == 1:
                yield Block(data.removeprefix(codecs.BOM_UTF8) if line == 1 else data, line, raw.tell() - before)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise UserError(f"{path} is truncated or damaged ({error}); get the file again or leave it out") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _decompress(raw, suffix: str) -> Iterator[bytes]:
    if suffix == ".zst":
        yield from _decompress_zstd(raw)
        return
    stream = gzip.GzipFile(fileobj=raw) if suffix == ".gz" else raw
    while chunk := stream.read(READ_BYTES):
        yield chunk


def _decompress_zstd(raw) -> Iterator[bytes]:
    frame = None  # a file may hold several frames; the library's own reader does not notice a truncated one
    while chunk := raw.read(READ_BYTES):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame is not complete")


def parse_json_line(line: bytes, text_key: str, path: Path, number: int) -> str:
    """The text of one line of JSON Lines.

    Raises:
        BadDocument: it has none.
    """
    if not line.strip():
        raise BadDocument("empty line", path, number)
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadDocument("invalid UTF-8", path, number) from error
    except (ValueError, RecursionError) as error:
        raise BadDocument("broken JSON", path, number) from error
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise BadDocument(f"no text under the key {text_key!r}", path, number)
    if not text.strip():
        raise BadDocument("empty document", path, number)
    if not _is_unicode(text):
        raise BadDocument("invalid UTF-8", path, number)  # half a surrogate pair, written as an escape
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_text(path: Path) -> Iterator[str]:
    """A plain file's text, exactly, in blocks of whole lines.

    Raises:
        BadDocument: the file is binary, empty, or not UTF-8 (which may show only in a later block).
    """
    empty = True
    for block in read_blocks(path):
        if block.first_line == 1 and b"\0" in block.data[:8192]:
            raise BadDocument("binary file", path, 1)
        try:
            text = block.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = block.first_line + block.data.count(b"\n", 0, error.start)
            raise BadDocument("invalid UTF-8", path, line) from error
        empty = empty and not text.strip()
        yield text
    if empty:
        raise BadDocument("empty document", path, 1)
