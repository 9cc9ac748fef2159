"""The two data tools from the command line."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_xmod.data.indexed import IndexedDataset
from megatron_xmod.data.tokenizer import load_tokenizer

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def run(tool, *arguments, timeout=60):
    command = [sys.executable, str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for path in Path(os.__file__).parent.glob("[a-c]*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_source_code_to_shard(tmp_path, source):
    model, prefix = tmp_path / "code.model", tmp_path / "code"
    learned = run("train_tokenizer.py", "--input", source, "--vocab-size", 1000, "--output", model)
    assert learned.returncode == 0, learned.stderr
    assert "learned 1,000 pieces" in learned.stdout and "reading" in learned.stderr
    made = run("preprocess_data.py", "--input", source / "*.py", "--tokenizer", "sentencepiece",
               "--tokenizer-path", model, "--output", prefix, "--workers", 2)
    assert made.returncode == 0, made.stderr
    assert "tokens/s" in made.stdout and "100%" in made.stderr
    shard, tokenizer = IndexedDataset(prefix), load_tokenizer("sentencepiece", model)
    texts = [path.read_bytes().decode() for path in sorted(source.glob("*.py"))]
    assert [tokenizer.decode(shard[i].tolist()) for i in range(len(shard))] == texts
    assert all(shard[i][-1] == tokenizer.eod for i in range(len(shard)))


def test_training_a_tokenizer_is_repeatable_and_bounded(tmp_path, source):
    models = [tmp_path / "1.model", tmp_path / "2.model"]
    for model in models:
        options = ("--vocab-size", 600, "--sample-mb", 0.1, "--output", model)
        result = run("train_tokenizer.py", "--input", source, *options)
        learned_from = int(re.search(r"from ([\d,]+) bytes", result.stdout)[1].replace(",", ""))
        assert 90_000 <= learned_from < 110_000
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "text", "message"),
    [(4096, "few letters", "too large for 11 bytes"), (260, "abcdefghijkl", "too small: .* need 27"), (9, "a", "259"),
     (300, "", "no usable text")],
)
def test_vocabulary_that_does_not_fit_is_one_message(tmp_path, vocab_size, text, message):
    (tmp_path / "a.txt").write_text(text)
    model = tmp_path / "m.model"
    result = run("train_tokenizer.py", "--input", tmp_path, "--vocab-size", vocab_size, "--output", model)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and re.search(message, last), last
    assert not model.exists()


def test_errors_are_one_line_and_non_zero(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nbroken\n')
    arguments = ["--tokenizer", "bytes", "--output", tmp_path / "out", "--workers", 2]
    strict = run("preprocess_data.py", "--input", tmp_path / "a.jsonl", *arguments, "--strict")
    missing = run("preprocess_data.py", "--input", tmp_path / "none", *arguments)
    for result, message in ((strict, "a.jsonl:2: broken JSON"), (missing, "matches no text file")):
        assert result.returncode == 1 and "Traceback" not in result.stderr
        assert message in result.stderr.strip().splitlines()[-1]
    assert not list(tmp_path.glob("*out*"))


def test_being_ended_leaves_nothing_behind(tmp_path):
    with open(tmp_path / "a.jsonl", "w") as stream:
        for _ in range(200_000):
            stream.write('{"text": "' + "word " * 50 + '"}\n')
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--input", str(tmp_path / "a.jsonl"), "--tokenizer",
               "bytes", "--output", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while not any(path.stat().st_size for path in tmp_path.glob(".out.bin.*")):
        assert process.poll() is None, "ended before it could be interrupted"
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(ProcessLookupError):  # its group is empty: no worker is left
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.05)
