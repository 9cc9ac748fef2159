"""Bad input gives one clear message, a non-zero exit within seconds, and no traceback."""

import shutil

import numpy as np
import pytest

from megatron_xmod.data.indexed import IndexedDatasetWriter

SETTINGS = {
    "L not divisible by K": (["--data.seq_length", "30"], "(30) must be a multiple of model.routing.K (4)"),
    "A*K not an integer": (["--model.routing.A", "0.3"], "The nearest A that work: 0.25 or 0.5"),
    "depth not reachable": (["--model.active_layers", "3", "--model.routing.A", "0.75"], "Active depths that work"),
    "unknown key": (["--data.seq_len", "64"], "data.seq_length"),
    "muon and tensor parallelism": (["--optimizer.name", "muon", "--parallel.tensor_parallel_size", "2"], "Use adamw"),
    "no data": (["--data.paths", "[]"], "data.paths is empty"),
    "missing shard": (["--data.paths", "nowhere/at_all"], "nowhere/at_all"),
    "tokenizer larger than the model": (["--model.vocab_size", "100"], "the tokenizer"),
    "batch": (["--train.micro_batch_size", "3"], "train.global_batch_size is 8"),
    "processes": (["--parallel.pipeline_parallel_size", "2"], "1 processes can't be shared"),
    "seed": (["--train.seed", "-1"], "train.seed is -1"),
    "DeepSpeed's own key": (["--deepspeed.zero_optimization.reduce_bucket_size", "abc"], "DeepSpeed refuses"),
    "a kernel that can't be used": (["--kernels.select", "triton"], "it needs a CUDA device"),
    "no validation data": (["--data.split", "100,0,0"], "valid"),
}


def refused(finished, message: str) -> None:
    assert finished.code == 1, finished
    assert message in finished.output, finished
    assert "Traceback" not in finished.output, finished
    assert finished.output.count("error: ") == 1, finished


@pytest.mark.parametrize("overrides, message", SETTINGS.values(), ids=SETTINGS)
def test_settings(pretrain, overrides, message):
    refused(pretrain(*overrides, timeout=60), message)


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
@pytest.mark.parametrize("overrides, message", [
    (["--train.micro_batch_size", "3"], "train.global_batch_size is 8"),
    (["--parallel.pipeline_parallel_size", "3"], "2 processes can't be shared"),
], ids=["batch", "layout"])
def test_said_once_by_two_processes(pretrain, launcher, overrides, message):
    finished = pretrain(*overrides, launcher=launcher, processes=2, timeout=60)
    assert finished.code != 0 and finished.output.count(message) == 1, finished


def test_stages_that_cannot_be_cut(pretrain):
    finished = pretrain("--parallel.pipeline_parallel_size", "4", launcher="torchrun", processes=4, timeout=60)
    assert finished.code != 0 and finished.output.count("error: ") == 1 and "stages" in finished.output, finished


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_shard(pretrain, shard, tmp_path, suffix):
    for ending in (".bin", ".idx"):
        shutil.copy(shard + ending, tmp_path / f"cut{ending}")
    file = tmp_path / f"cut{suffix}"
    file.write_bytes(file.read_bytes()[:-100])
    refused(pretrain("--data.paths", str(tmp_path / "cut")), str(file))


def test_token_beyond_the_vocabulary(pretrain, tmp_path):
    with IndexedDatasetWriter(tmp_path / "odd", np.uint16) as writer:
        writer.add_documents(np.tile(np.arange(200), 50), [200] * 50)
        writer.add_documents(np.array([1, 999, 2]), [3])
    finished = pretrain("--data.paths", str(tmp_path / "odd"), "--data.split", "80,20,0")
    refused(finished, "999")


def test_resume_with_another_architecture(pretrain, tmp_path):
    assert pretrain("--train.exit_after", "1").code == 0
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    refused(pretrain("--model.ffn_size", "64"), "model.ffn_size is 48 there, 64 here")
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == latest


def test_resume_with_another_layout(pretrain):
    assert pretrain("--train.exit_after", "1").code == 0
    finished = pretrain("--parallel.pipeline_parallel_size", "2", launcher="torchrun", processes=2, timeout=60)
    assert finished.code != 0 and "Resume with the layout" in finished.output, finished


def test_damaged_checkpoint(pretrain, tmp_path):
    assert pretrain("--train.exit_after", "1").code == 0
    layer = next((tmp_path / "run" / "checkpoints" / "step_00000001").glob("layer_01*"))
    layer.write_bytes(layer.read_bytes()[:1000])
    refused(pretrain(), "can't be loaded")
