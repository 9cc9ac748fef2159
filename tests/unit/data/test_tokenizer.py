"""Round trips, ends of documents, and refusals of the three tokenizers."""

import io
import json
import random
import subprocess
import sys

import pytest
import sentencepiece
import tokenizers

from megatron_xmod.data.tokenizer import BytesTokenizer, load_tokenizer
from megatron_xmod.data.tokenizer_training import train_tokenizer
from megatron_xmod.errors import UserError

CODE = "def f(x):\n\tif x  ==  1:\n        return  [x, 22]  \n\n\n# ende  \r\n"
TEXTS = [
    CODE,
    " leading and trailing  ",
    "\n",
    "   ",
    "ünïcödé 漢字 \U0001f600 e\u0301 ﬁ ½ \u00a0\u2003\u3000\u200b\ufeff",
    "one ▁ sign ▁▁ and\x00 control\x1f\x7f",
    "<s></s><unk> <0x0A> <|endoftext|>",
    "",
]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "a.py").write_text(CODE * 50)
    train_tokenizer([str(folder)], str(folder / "code.model"), 300)
    return folder / "code.model"


@pytest.fixture
def hf_folder(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<mine>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([CODE] * 20, trainer)
    model.enable_truncation(5)
    model.enable_padding(length=9)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["sentencepiece", "hf", "bytes"])
def test_round_trip(kind, text, sentencepiece_model, hf_folder):
    path = {"sentencepiece": sentencepiece_model, "hf": hf_folder, "bytes": None}[kind]
    tokenizer = load_tokenizer(kind, path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_sentencepiece_gives_any_text_back(sentencepiece_model):
    tokenizer = load_tokenizer("sentencepiece", sentencepiece_model)
    rng = random.Random(0)
    ranges = [(0, 0x7F), (0x20, 0x7E), (0, 0x2FFF), (0x2580, 0x2582), (0xE000, 0x10FFFF)]
    for _ in range(300):
        low, high = rng.choice(ranges)
        text = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(0, 30)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_hold_white_space(sentencepiece_model):
    tokenizer = load_tokenizer("sentencepiece", sentencepiece_model)
    assert len(tokenizer.encode("        ")) < 8
    assert len(tokenizer.encode("):\n")) < 3


def train_model(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([CODE] * 20),
        model_writer=model,
        vocab_size=60,
        minloglevel=2,
        model_type="bpe",
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


def test_sentencepiece_without_end_of_document(tmp_path):
    path = train_model(tmp_path / "no_eos.model", eos_id=-1, user_defined_symbols=["<end>"])
    with pytest.raises(UserError, match="no end-of-document token"):
        load_tokenizer("sentencepiece", path)
    with pytest.raises(UserError, match="no token '<nix>'"):
        load_tokenizer("sentencepiece", path, "<nix>")
    tokenizer = load_tokenizer("sentencepiece", path, "<end>")
    assert 0 < tokenizer.eod < tokenizer.vocab_size


def test_hf_end_of_document(hf_folder):
    assert load_tokenizer("hf", hf_folder).eod == 0
    assert load_tokenizer("hf", hf_folder / "tokenizer.json", "<mine>").eod == 1
    (hf_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<mine>"}}))
    assert load_tokenizer("hf", hf_folder).eod == 1
    with pytest.raises(UserError, match=r"no token '<nix>'.*<\|endoftext\|>"):
        load_tokenizer("hf", hf_folder, "<nix>")


def test_hf_without_end_of_document(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="no end-of-document token"):
        load_tokenizer("hf", tmp_path)
    assert load_tokenizer("hf", tmp_path, "b").vocab_size == 8  # ids with gaps


def test_bytes():
    tokenizer = BytesTokenizer()
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode([195]) == "\ufffd"


@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        ("word", None, "unknown; choose one of"),
        ("hf", None, "needs the path"),
        ("bytes", "x", "no file"),
        ("hf", "missing", "does not exist"),
        ("sentencepiece", "missing", "does not exist"),
    ],
)
def test_bad_choice(kind, path, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(kind, path)


@pytest.mark.parametrize("kind", ["hf", "sentencepiece"])
def test_damaged_file(tmp_path, kind):
    (tmp_path / "file").write_bytes(b"\x00not a tokenizer")
    with pytest.raises(UserError, match="is not a "):
        load_tokenizer(kind, tmp_path / "file")


def test_data_side_starts_without_torch():
    code = """
import sys
import megatron_xmod.data.build, megatron_xmod.data.preprocess, megatron_xmod.data.sampler
import megatron_xmod.data.tokenizer_training
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
