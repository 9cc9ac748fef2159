"""Training a SentencePiece tokenizer that gives every text back exactly, made for source code as much as for prose."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_xmod.data.corpus import BadDocument, find_files, has_json_lines, parse_json_line, read_blocks, read_text
from megatron_xmod.data.preprocess import progress_bar
from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import write_atomically

SENTENCE_CHARACTERS = 4096  # consecutive lines are learned from together, so that pieces may hold line ends
SMALLEST_VOCABULARY = 2 + 256 + 1  # unknown, end of document, bytes, a character


def train_tokenizer(
    inputs: list[str],
    output: str,
    vocab_size: int,
    *,
    format: str = "auto",
    text_key: str = "text",
    sample_bytes: int = 100_000_000,
    extensions: list[str] | None = None,
    exclude: list[str] | None = None,
) -> int:
    """Train a byte-pair-encoding SentencePiece model and write it to `output`, showing progress on standard error.

    No normalisation, all white space kept, unknown characters as bytes: decode(encode(text)) == text. Piece 0 is
    unknown (never used), piece 1 `</s>` ends a document. Digits are pieces of their own.

    Args:
        inputs, format, text_key, extensions, exclude: as for `preprocess`.
        vocab_size: V, pieces.
        sample_bytes: text learned from at most; every file gives an equal share from its beginning, small ones all.

    Returns:
        Bytes of text learned from.

    Raises:
        UserError: no text, or a vocabulary too small or too large for it; an older model stays as it was.
    """
    from sentencepiece import SentencePieceTrainer

    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"--vocab-size is {vocab_size}; 256 bytes and special pieces alone need {SMALLEST_VOCABULARY}")
    if sample_bytes <= 0:
        raise UserError(f"--sample-mb must be above 0 (it is {sample_bytes / 1e6:g})")
    texts = _Sample(find_files(inputs, extensions, exclude), format, text_key, sample_bytes)
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=texts.sentences(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            max_sentence_length=8 * SENTENCE_CHARACTERS,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(error, vocab_size, texts.bytes) from error
    write_atomically(output, model.getvalue())
    return texts.bytes


class _Sample:
    """A bounded sample of some files; `bytes` counts what was taken."""

    def __init__(self, files: list[Path], format: str, text_key: str, limit: int):
        self.files, self.format, self.text_key, self.limit, self.bytes = files, format, text_key, limit, 0

    def sentences(self) -> Iterator[str]:
        """Runs of whole lines of about SENTENCE_CHARACTERS."""
        files = self.files[:: 1 + len(self.files) * SENTENCE_CHARACTERS // self.limit]  # not more than can have a share
        files = sorted(files, key=lambda path: path.stat().st_size)  # what small files leave goes to the large ones
        total = sum(path.stat().st_size for path in files)
        with progress_bar(total, f"reading {len(files):,} files") as bar:
            for number, path in enumerate(files):
                full = self.bytes + (self.limit - self.bytes) // (len(files) - number)
                for sentence in _cut(self._texts(path)):
                    yield sentence
                    self.bytes += len(sentence.encode("utf-8"))
                    if self.bytes >= full:
                        break
                bar.update(path.stat().st_size)
            bar.set_description_str("read; now learning pieces")

    def _texts(self, path: Path) -> Iterator[str]:
        """The usable text of a file; what is wrong with the rest is `preprocess`'s to report."""
        try:
            if not has_json_lines(path, self.format):
                yield from read_text(path)
                return
        except BadDocument:
            return
        for block in read_blocks(path):
            for number, line in block.numbered_lines():
                try:
                    yield parse_json_line(line, self.text_key, path, number)
                except BadDocument:
                    continue


def _cut(texts: Iterator[str]) -> Iterator[str]:
    """Cut texts into pieces of at most SENTENCE_CHARACTERS, at line ends where there are any."""
    for text in texts:
        start = 0
        while start < len(text):
            end = start + SENTENCE_CHARACTERS
            if end < len(text):
                end = text.rfind("\n", start, end) + 1 or end
            yield text[start:end]
            start = end


def _explain(error: RuntimeError, vocab_size: int, size: int) -> UserError:
    message = str(error)
    if size == 0:
        return UserError("the input holds no usable text to learn from; check the files and --text-key")
    most, least = re.search(r"<= (\d+)", message), re.search(r"required_chars\. \d+ vs (\d+)", message)
    if least:
        return UserError(
            f"--vocab-size {vocab_size} is too small: the bytes and the characters of this text need {least.group(1)}"
        )
    if most:
        return UserError(
            f"--vocab-size {vocab_size} is too large for {size:,} bytes of text: at most {most.group(1)} pieces can be "
            "learned from it; ask for fewer or give more text"
        )
    return UserError(f"SentencePiece could not learn {vocab_size} pieces from {size:,} bytes: {message.strip()}")
