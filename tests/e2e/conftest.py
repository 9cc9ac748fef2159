"""Whole programs in processes of their own, on a toy model and a toy shard."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_xmod.data.indexed import IndexedDatasetWriter

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TOY = """
model: {hidden_size: 32, ffn_size: 48, heads: 4, kv_heads: 2, head_dim: 8, vocab_size: 257, active_layers: 6,
        prefix_layers: 1, routing: {K: 4, A: 1.5}}
data: {seq_length: 32, split: "90,10,0", tokenizer: bytes}
optimizer: {lr: 1.0e-3}
train: {steps: 20, global_batch_size: 8, micro_batch_size: 2, precision: fp32, device: cpu, log_interval: 1,
        eval_batches: 2, tensorboard: false, timeout_minutes: 1}
"""


class Finished:
    """A program that ended: exit code, what it printed, and how long it took."""

    def __init__(self, code: int, output: str):
        self.code, self.output = code, output

    def __repr__(self):
        return f"exit code {self.code}\n{self.output}"


class Job:
    """pretrain_xmod.py under a launcher, in the background; killed with everything it started when the test ends."""

    def __init__(self, launcher: str, processes: int, arguments: list[str], limit_file_bytes: int | None,
                 environment: dict[str, str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.arguments = arguments
        script = [str(ROOT / "pretrain_xmod.py"), *arguments]
        command = {
            "python": [sys.executable, *script],
            "torchrun": [str(BIN / "torchrun"), "--master-port", port, "--nproc-per-node", str(processes), *script],
            "deepspeed": [str(BIN / "deepspeed"), "--quiet", "--master_port", port, "--num_accelerators",
                          str(processes), *script],
        }[launcher]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1",
                       "PATH": f"{BIN}:{os.environ['PATH']}", **environment}
        if launcher == "deepspeed":
            environment["DS_ACCELERATOR"] = "cpu"  # the launcher counts accelerators by it
        if limit_file_bytes:
            command = ["bash", "-c", f'ulimit -f {limit_file_bytes // 1024} && exec "$@"', "limited", *command]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, start_new_session=True)
        self.lines: list[str] = []

    def wait_for(self, text: str) -> None:
        """Reads the output up to a line with this text."""
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"the job ended without {text!r}:\n{''.join(self.lines)}")

    def ranks(self) -> list[int]:
        """Process ids of the ranks: python (-u) pretrain_xmod.py with this job's arguments."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "python" in words[0] and any(w.endswith("pretrain_xmod.py") for w in words[1:3]) and \
                    set(self.arguments) <= set(words):
                found.append(int(folder.name))
        return sorted(found)

    def finish(self, timeout: float) -> Finished:
        rest, _ = self.process.communicate(timeout=timeout)
        return Finished(self.process.returncode, "".join(self.lines) + rest)

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for rank in self.ranks():
            os.kill(rank, signal.SIGKILL)


@pytest.fixture(scope="session")
def shard(tmp_path_factory) -> str:
    """Prefix of a shard of 300 documents of bytes that a model can learn something from."""
    prefix = tmp_path_factory.mktemp("data") / "toy"
    rng = np.random.RandomState(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(300):
            steps = rng.choice([1, 1, 1, 7], size=rng.randint(20, 200))
            tokens = np.append(np.cumsum(steps) % 200, 256)
            writer.add_documents(tokens, [len(tokens)])
    return str(prefix)


@pytest.fixture
def start(shard, tmp_path):
    """start(overrides...) -> a Job on the toy configuration, with its output in tmp_path / "run"."""
    (tmp_path / "toy.yaml").write_text(TOY)
    jobs = []

    def start_job(*overrides: str, launcher: str = "python", processes: int = 1, limit_file_bytes: int | None = None,
                  **environment: str) -> Job:
        arguments = ["--config", str(tmp_path / "toy.yaml"), "--data.paths", shard, "--train.output",
                     str(tmp_path / "run"), *overrides]
        jobs.append(Job(launcher, processes, arguments, limit_file_bytes, environment))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


@pytest.fixture
def pretrain(start):
    """pretrain(overrides...) -> Finished."""
    return lambda *overrides, timeout=120, **how: start(*overrides, **how).finish(timeout)


def losses(run: Path) -> dict[int, float]:
    """Training loss of every logged step."""
    return {entry["step"]: entry["loss"] for entry in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
