import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_xmod.benchmark.measure import Measured
from megatron_xmod.benchmark.report import rows, table
from megatron_xmod.benchmark.subjects import Subject, variant_config
from megatron_xmod.config.load import load_config

ROOT = Path(__file__).parents[3]
TINY = ["--model.hidden_size", "32", "--model.ffn_size", "32", "--model.vocab_size", "64",
        "--model.active_layers", "10", "--seq-length", "64", "--steps", "2", "--warm-up", "1", "--device", "cpu"]


def subject(name: str, flops: float) -> Subject:
    model = torch.nn.Linear(2, 2)
    return Subject(name, model, torch.optim.SGD(model.parameters()), lambda tokens: tokens, flops)


def measured(*steps: tuple[float, float, float]) -> Measured:
    return Measured(dict(zip(("forward", "backward", "optimizer"), map(list, zip(*steps, strict=True)), strict=True)),
                    launches=30, selection_launches=5)


def test_efficiency_by_hand():
    dense, half = subject("dense", 100.0), subject("half", 50.0)
    found = {"dense": measured((1, 2, 1), (1, 2, 1), (9, 9, 9)),
             "half": measured((0.5, 1, 1), (0.5, 1, 1), (0.5, 1, 1))}
    first, second = rows([dense, half], found, 10, torch.device("cpu"))
    assert first["step_seconds"] == 4 and first["efficiency"] == 1 and first["flops_per_step"] == 1000
    assert second["step_seconds"] == 2.5 and second["tokens_per_second"] == 4
    assert second["efficiency"] == pytest.approx(4 / 2.5 / 2)
    assert second["efficiency_forward_backward"] == pytest.approx(1.0)
    assert second["launches_over_dense"] == pytest.approx(25 / 30)
    assert "| half | 2.500 |" in table([first, second])


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "benchmark.py"), "--config",
               str(ROOT / "examples" / "configs" / "size" / "165m.yaml"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_tool_writes_its_rows(tmp_path):
    variants = ["dense", "mod", "soft:a4k8", "exclusive:a4k8"]
    done = run("--variants", *variants, "--json", str(tmp_path / "rows.json"), *TINY)
    assert done.returncode == 0, done.stderr
    made = {row["variant"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert list(made) == variants
    for row in made.values():
        assert row.keys() >= {"step_seconds", "tokens_per_second", "flops_per_step", "efficiency", "peak_memory_bytes"}
        assert row["peak_memory_bytes"] > 3 * 4 * row["parameters"]  # weights and AdamW's two averages
    assert made["dense"]["selection_launches"] == 0 < made["exclusive:a4k8"]["selection_launches"]
    assert made["exclusive:a4k8"]["kernel_launches"] < made["soft:a4k8"]["kernel_launches"] / 2
    assert (tmp_path / "rows.md").exists()


def test_launches_are_those_of_a_step(tmp_path):
    counts = []
    for accumulation in "12":
        done = run("--variants", "dense", "--accumulation", accumulation, "--json", str(tmp_path / "rows.json"), *TINY)
        assert done.returncode == 0, done.stderr
        counts.append(json.loads((tmp_path / "rows.json").read_text())["rows"][0]["kernel_launches"])
    assert counts[1] > 1.5 * counts[0]


def test_a_variant_of_any_a_and_k():
    base = [str(ROOT / "examples" / "configs" / "size" / "165m.yaml")]
    model = variant_config(base, "exclusive:a0.5k4", []).model
    assert (model.routing.mode, model.routing.A, model.routing.K) == ("exclusive", 0.5, 4)
    published = load_config([word for file in (*base, str(ROOT / "examples/configs/variant/a4k8.yaml"))
                             for word in ("--config", file)])
    assert variant_config(base, "a4k8", []) == published


@pytest.mark.parametrize("arguments, message", [
    (["--variants", "dense", "dense"], "twice"),
    (["--variants", "dense", "--steps", "0"], "--steps is 0"),
    (["--variants", "nowhere:dense"], "has mode 'nowhere'"),
    (["--variants", "dense", "--optimizer.name", "muon", "--dtype", "bf16", "--parallel.zero_stage", "0",
      "--train.precision", "fp32"], "--dtype fp32"),
    (["--config", str(ROOT / "examples/configs/variant/dense.yaml"), "--variants", "a4k8"], "it would be dense"),
    (["--variants", "a1k16", "--model.active_layers", "5", "--seq-length", "64"], "it would be dense"),
])
def test_bad_options_are_one_message(arguments, message):
    done = run(*arguments)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
