"""Megatron's `.bin` / `.idx` token shards: memory-mapped reading, streaming atomic writing, merging."""

import struct
from array import array
from pathlib import Path

import numpy as np

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import PendingFile

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document ends
DTYPE_OF_CODE = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODE_OF_DTYPE = {np.dtype(dtype): code for code, dtype in DTYPE_OF_CODE.items()}
CHECK_ROWS = 1 << 20  # index rows compared at a time
SCAN_BLOCKS, SCAN_TOKENS = 64, 1 << 16  # at open, at most this many blocks of this many tokens are looked at
COPY_BYTES = 1 << 22


def token_dtype(vocab_size: int) -> type:
    """The dtype Megatron stores tokens of a vocabulary in: uint16 below 65500 entries, otherwise int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


def shard_path(prefix: Path | str, suffix: str) -> Path:
    """`prefix` with `.bin` or `.idx` appended (a dot inside the prefix stays)."""
    return Path(f"{prefix}{suffix}")


class IndexedDataset:
    """A read-only, memory-mapped shard of N token sequences.

    Args:
        prefix: path of the shard without `.bin` / `.idx`.

    Attributes:
        lengths: int32 [N], tokens per sequence.
        document_ends: int64 [D], D − 1 documents; document d holds the sequences `[ends[d], ends[d + 1])`.
        tokens: all tokens of the shard, in order, in the dtype of the file.

    Raises:
        UserError: a file is missing, is no Megatron index, or its size does not fit the other's.
    """

    def __init__(self, prefix: Path | str):
        self.prefix = str(prefix)
        self.vocab_size: int | None = None
        self._index_path, self._bin_path = shard_path(prefix, ".idx"), shard_path(prefix, ".bin")
        for path in (self._index_path, self._bin_path):
            if not path.is_file():
                raise UserError(
                    f"{path} does not exist. A data path names a shard without .bin or .idx; "
                    "make one with tools/preprocess_data.py --output PREFIX"
                )
        self._read_index()
        self._check_index()
        self.tokens = np.memmap(self._bin_path, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """All tokens of sequence `index`, without a copy."""
        return self.read(index, 0, None)

    def read(self, index: int, begin: int, end: int | None) -> np.ndarray:
        """Tokens `[begin, end)` of sequence `index`, without a copy; `end` None means to its end.

        Raises:
            UserError: a token lies outside the vocabulary given to `limit_vocabulary`.
        """
        length = int(self.lengths[index])
        start = int(self._offsets[index]) // self.dtype.itemsize
        tokens = self.tokens[start + begin : start + (length if end is None else end)]
        if self.vocab_size is not None:
            self._check_tokens(tokens, start + begin)
        return tokens

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Refuse tokens outside `[0, vocab_size)`: now in evenly spaced blocks (all of a small shard), later in
        everything that is read."""
        if self.vocab_size == vocab_size:
            return
        last = max(len(self.tokens) - SCAN_TOKENS, 0)
        self.vocab_size = vocab_size
        for start in np.unique(np.linspace(0, last, SCAN_BLOCKS, dtype=np.int64)).tolist():
            self._check_tokens(self.tokens[start : start + SCAN_TOKENS], start)

    def _check_tokens(self, tokens: np.ndarray, start: int) -> None:
        """Check a slice that begins `start` tokens into the shard."""
        if len(tokens) == 0 or (tokens.max() < self.vocab_size and tokens.min() >= 0):
            return
        bad = int(np.flatnonzero((tokens >= self.vocab_size) | (tokens < 0))[0])
        byte = (start + bad) * self.dtype.itemsize
        sequence = int(np.searchsorted(self._offsets, byte, side="right")) - 1
        document = int(np.searchsorted(self.document_ends, sequence, side="right")) - 1
        raise UserError(
            f"{self._bin_path}: document {document} holds token id {int(tokens[bad])}, outside the vocabulary of "
            f"{self.vocab_size}. The shard was made with another tokenizer: preprocess it again with this model's, "
            "or set the model's vocabulary to the tokenizer's size"
        )

    def _read_index(self) -> None:
        path, size = self._index_path, self._index_path.stat().st_size
        remedy = "copy the file again, or make the shard again with tools/preprocess_data.py"
        if size < HEADER.size:
            raise UserError(f"{path} is truncated: {size} bytes, the header alone has {HEADER.size}; {remedy}")
        with open(path, "rb") as stream:
            magic, version, code, sequences, ends = HEADER.unpack(stream.read(HEADER.size))
        if magic != MAGIC or version != 1:
            raise UserError(f"{path} is not a Megatron index (it begins with {magic!r}, version {version}); {remedy}")
        if code not in DTYPE_OF_CODE:
            raise UserError(f"{path}: dtype code {code} is no integer token type; {remedy}")
        if sequences == 0:
            raise UserError(f"{path}: the shard is empty, it holds no document; give an input with text")
        expected = HEADER.size + 12 * sequences + 8 * ends
        if size == expected + sequences:
            raise UserError(f"{path} is a multimodal index; only text shards can be trained on")
        if size != expected:
            kind = "truncated" if size < expected else "damaged"
            raise UserError(
                f"{path} is {kind}: {size} bytes, but {sequences} sequences need {expected}; {remedy}"
            )
        self.dtype = np.dtype(DTYPE_OF_CODE[code]).newbyteorder("<")
        self._index_map = np.memmap(path, dtype=np.uint8, mode="r")  # owns the three arrays below
        view, position = self._index_map, HEADER.size
        self.lengths = np.frombuffer(view, "<i4", sequences, position)
        self._offsets = np.frombuffer(view, "<i8", sequences, position + 4 * sequences)
        self.document_ends = np.frombuffer(view, "<i8", ends, position + 12 * sequences)

    def _check_index(self) -> None:
        """Sequences must follow one another without gaps and fill the `.bin` exactly."""
        remedy = "copy both files again, or make the shard again with tools/preprocess_data.py"
        end = 0
        for row in range(0, len(self), CHECK_ROWS):
            lengths = self.lengths[row : row + CHECK_ROWS].astype(np.int64)
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            begins = ends - lengths * self.dtype.itemsize
            if lengths.min() < 0 or not np.array_equal(begins, self._offsets[row : row + CHECK_ROWS]):
                raise UserError(f"{self._index_path} is damaged: lengths and offsets disagree; {remedy}")
            end = int(ends[-1])
        marks = self.document_ends
        if len(marks) < 2 or marks[0] != 0 or marks[-1] != len(self) or np.any(np.diff(marks) < 0):
            raise UserError(f"{self._index_path} is damaged: document ends do not cover the sequences; {remedy}")
        size = self._bin_path.stat().st_size
        if size != end:
            kind = "truncated" if size < end else "longer than its index says"
            raise UserError(f"{self._bin_path} is {kind}: {size} bytes, {self._index_path} needs {end}; {remedy}")
        if size == 0:
            raise UserError(f"{self._bin_path} holds no token; give an input with text")


class IndexedDatasetWriter:
    """Writes a shard document by document; the two files appear together when the block ends without an error.

    Use as a context manager. Memory: 12 bytes per document.

    Args:
        prefix: path of the shard without `.bin` / `.idx`; missing folders are made.
        dtype: token dtype, see `token_dtype`.
    """

    def __init__(self, prefix: Path | str, dtype: type):
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        self._bin = PendingFile(shard_path(prefix, ".bin"))
        self._index = PendingFile(shard_path(prefix, ".idx"))

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._bin.discard()
            self._index.discard()

    def add_documents(self, tokens: np.ndarray, lengths) -> None:
        """Append documents of one sequence each.

        Args:
            tokens: [T] token ids of all these documents, end to end.
            lengths: tokens per document, their sum is T.
        """
        assert len(tokens) == int(np.sum(lengths)), "lengths do not add up to the tokens"
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype))
        first = len(self._lengths)
        self._lengths.extend(np.asarray(lengths, dtype=np.int32).tolist())
        self._document_ends.extend(range(first + 1, len(self._lengths) + 1))

    def add_shard(self, shard: IndexedDataset) -> None:
        """Append a whole shard by streaming copy.

        Raises:
            UserError: its token dtype differs.
        """
        if shard.dtype != self.dtype:
            raise UserError(
                f"{shard.prefix} stores {shard.dtype.name}, the output {self.dtype.name}: shards can be merged only "
                "when one tokenizer made them; preprocess again"
            )
        first = len(self._lengths)
        data = shard.tokens.view(np.uint8)
        for start in range(0, len(data), COPY_BYTES):
            self._bin.write(data[start : start + COPY_BYTES])
        self._lengths.frombytes(shard.lengths.tobytes())
        self._document_ends.frombytes((shard.document_ends[1:] + first).tobytes())

    def _finish(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        ends = np.frombuffer(self._document_ends, dtype=np.int64)
        header = HEADER.pack(MAGIC, 1, CODE_OF_DTYPE[np.dtype(self.dtype.name)], len(lengths), len(ends))
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        for part in (header, lengths.astype("<i4"), offsets.astype("<i8"), ends.astype("<i8")):
            self._index.write(part)
        self._bin.seal()
        self._index.seal()
        # Between the two renames an old index must never stand beside a new .bin.
        self._index.path.unlink(missing_ok=True)
        self._bin.publish()
        self._index.publish()


def merge_shards(prefixes: list[str], output: Path | str) -> None:
    """Append shards to one another, in order, into the new shard `output`; memory holds the index only.

    Raises:
        UserError: a shard can't be read or token dtypes differ.
    """
    shards = [IndexedDataset(prefix) for prefix in prefixes]
    with IndexedDatasetWriter(output, shards[0].dtype.type) as writer:
        for shard in shards:
            writer.add_shard(shard)
