"""Tokenizers behind one small protocol: SentencePiece models, Hugging Face `tokenizer.json` files, plain bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatron_xmod.errors import UserError

KINDS = ("sentencepiece", "hf", "bytes")
COMMON_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<eod>", "[EOS]")
ESCAPED_SPACE = "▁"  # how SentencePiece writes a space


class Tokenizer(Protocol):
    """What the program needs of a tokenizer.

    There is no padding id on purpose: documents are packed end to end and nothing is ever padded, so a padding token
    can't be mistaken for the end of a document, which must be learned.

    Attributes:
        vocab_size: V, one more than the largest id.
        eod: id that ends a document.
    """

    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without anything added. Text never becomes a special token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens give nothing, broken UTF-8 gives U+FFFD."""


class SentencePieceTokenizer:
    """A SentencePiece `.model`.

    Args:
        path: the model file.
        eod_token: piece that ends a document; default the model's end-of-sentence piece.
    """

    def __init__(self, path: Path | str, eod_token: str | None = None):
        from sentencepiece import SentencePieceProcessor

        _require_file(path)
        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise UserError(f"{path} is not a SentencePiece model; make one with tools/train_tokenizer.py") from error
        self.vocab_size = self._model.get_piece_size()
        if eod_token is None:
            self.eod = self._model.eos_id()
        else:
            self.eod = self._model.piece_to_id(eod_token)
            if self._model.id_to_piece(self.eod) != eod_token:
                self.eod = -1
        if self.eod < 0:
            raise _no_end_of_document(path, eod_token, "train it with an end-of-sentence piece (eos_id)")
        self._escaped_space_bytes = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in ESCAPED_SPACE.encode()]
        self._has_bytes = all(self._model.is_byte(piece) for piece in self._escaped_space_bytes)

    def encode(self, text: str) -> list[int]:
        if ESCAPED_SPACE not in text or not self._has_bytes:
            return self._model.encode(text)
        # The model can't tell this character from a space; as bytes it survives.
        first, *others = (self._model.encode(part) for part in text.split(ESCAPED_SPACE))
        for part in others:
            first += self._escaped_space_bytes + part
        return first

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids))


class HFTokenizer:
    """A Hugging Face `tokenizer.json`; truncation and padding stored in it are switched off.

    Args:
        path: the file, or the folder that holds it.
        eod_token: token that ends a document; default the `eos_token` of a `tokenizer_config.json` beside it, or the
            first usual name (`<|endoftext|>`, `</s>`, ...) among the special tokens.
    """

    def __init__(self, path: Path | str, eod_token: str | None = None):
        from tokenizers import Tokenizer as Model

        path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        _require_file(path)
        try:
            self._model = Model.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # "</s>" inside a document stays text
        self.vocab_size = max(self._model.get_vocab().values()) + 1
        names = [eod_token] if eod_token else [*_configured_eos(path), *COMMON_END_OF_DOCUMENT]
        ids = (self._model.token_to_id(name) for name in names)
        self.eod = next((id for id in ids if id is not None), -1)
        if self.eod < 0:
            special = [token.content for token in self._model.get_added_tokens_decoder().values() if token.special]
            raise _no_end_of_document(path, eod_token, f"its special tokens are {special}; name one of them")

    def encode(self, text: str) -> list[int]:
        [encoding] = self._model.encode_batch_fast([text], add_special_tokens=False)  # leaves out the text offsets
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids), skip_special_tokens=True)


class BytesTokenizer:
    """The 256 bytes of UTF-8 and one id for the end of a document."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id < 256).decode("utf-8", errors="replace")


def load_tokenizer(kind: str, path: Path | str | None = None, eod_token: str | None = None) -> Tokenizer:
    """Open a tokenizer.

    Args:
        kind: "sentencepiece", "hf" or "bytes".
        path: its file; "bytes" has none.
        eod_token: name of the token that ends a document, where the file does not say it.

    Raises:
        UserError: unknown kind, missing or damaged file, or no token that ends a document.
    """
    if kind not in KINDS:
        raise UserError(f"the tokenizer {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if kind == "bytes":
        if path is not None or eod_token is not None:
            raise UserError("the bytes tokenizer has no file and its own end-of-document id; leave both away")
        return BytesTokenizer()
    if path is None:
        raise UserError(f"the tokenizer {kind!r} needs the path of its file")
    return SentencePieceTokenizer(path, eod_token) if kind == "sentencepiece" else HFTokenizer(path, eod_token)


def _require_file(path: Path | str) -> None:
    if not Path(path).is_file():
        raise UserError(f"the tokenizer file {path} does not exist; check data.tokenizer_path (--tokenizer-path)")


def _configured_eos(path: Path) -> list[str]:
    """The end-of-sentence token that a tokenizer_config.json beside `path` names, if any."""
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return []
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config} is not a tokenizer configuration: {error}") from error
    name = token.get("content") if isinstance(token, dict) else token
    return [name] if name else []


def _no_end_of_document(path: Path | str, eod_token: str | None, remedy: str) -> UserError:
    missing = f"has no token {eod_token!r}" if eod_token else "has no end-of-document token"
    return UserError(f"{path} {missing}, so the model could not learn where documents end; {remedy}")
