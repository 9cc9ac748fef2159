"""Sweeps of a toy model, planned on an empty shard; nothing is trained."""

import json

import pytest
import yaml

from megatron_xmod.config.load import save_config
from megatron_xmod.runtime.files import write_atomically
from megatron_xmod.sweep.plan import make_plan
from megatron_xmod.sweep.spec import read_spec

MODEL = {"hidden_size": 32, "ffn_size": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab_size": 257,
         "active_layers": 6, "prefix_layers": 1, "routing": {"K": 4, "A": 1.5}}
DENSE = {"model.prefix_layers": None}


@pytest.fixture
def sweep(tmp_path):
    """sweep(keys of the file...) -> its path; `settings` come on top of a toy model."""
    def write(settings=None, **keys) -> str:
        (tmp_path / "text.idx").touch()
        base = {"model": MODEL, "data": {"paths": [str(tmp_path / "text")], "seq_length": 64},
                "train": {"steps": 20, "global_batch_size": 4, "precision": "fp32", "device": "cpu"}}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(base, sort_keys=False))
        keys = {"output": str(tmp_path / "out"), "configs": [str(tmp_path / "base.yaml")], "settings": settings, **keys}
        path = tmp_path / "sweep.yaml"
        given = {key: value for key, value in keys.items() if value is not None}
        path.write_text(yaml.safe_dump(given, sort_keys=False))
        return str(path)
    return write


@pytest.fixture
def plan(sweep):
    """plan(keys of the file...) -> the Plan."""
    return lambda settings=None, **keys: make_plan(read_spec(sweep(settings, **keys)))


def loss_of(run, step: int) -> float:
    """An invented loss: falls with tokens, and is .1 lower for sparse runs."""
    return 2 + 3 * (step * run.tokens_per_step) ** -0.1 - 0.1 * (run.config.model.prefix_layers is not None)


def leave_finished(run, loss=loss_of, points: int = 5) -> None:
    """The folder as a finished run leaves it."""
    steps = run.config.train.steps
    marks = sorted({round(steps * (i + 1) / points) for i in range(points)} - {0})
    validation = [{"step": 0, "loss_causal": 5.5, "loss_topk": 5.5}]
    validation += [{"step": s, "loss_causal": loss(run, s), "loss_topk": loss(run, s) - 0.01} for s in marks]
    save_config(run.config, run.folder / "config.yaml")
    final = {**validation[-1], "finished": True, "seconds": 1.0}
    write_atomically(run.folder / "summary.json", json.dumps({"validation": validation, "final": final}))
    lines = [{"step": s, "tokens": s * run.tokens_per_step, "tokens_per_second": 1000.0} for s in marks]
    write_atomically(run.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
