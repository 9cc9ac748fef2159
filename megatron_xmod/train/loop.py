"""The training run: data, steps, evaluation, checkpoints, the end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_xmod.checkpoint import store
from megatron_xmod.config.load import save_config
from megatron_xmod.config.schema import Config
from megatron_xmod.data.build import build_datasets
from megatron_xmod.data.sampler import BatchSampler, read_batches
from megatron_xmod.errors import UserError
from megatron_xmod.flops import train_flops_per_token
from megatron_xmod.kernels.registry import describe
from megatron_xmod.runtime.folder import claim_folder
from megatron_xmod.train.engine import Trainable, build_trainable
from megatron_xmod.train.evaluate import evaluate
from megatron_xmod.train.metrics import Console, Recorder, gather_routing, peak_memory, summarise_routing

_SKIPPED_STEPS_IN_A_ROW = 10


def open_datasets(config: Config) -> tuple:
    """(training, validation) samples of data.seq_length + 1 tokens.

    Raises:
        UserError: nothing to train or validate on, or a broken shard.
    """
    batch, evaluated = config.train.global_batch_size, config.train.eval_batches
    wanted = (config.data.samples or config.train.steps * batch, evaluated * batch, 0)
    train_set, valid_set, _ = build_datasets(config.data.paths, config.data.weights, config.data.split,
                                             config.data.seq_length, config.data.seed, wanted,
                                             vocab_size=config.model.vocab_size)
    return train_set, valid_set


class Trainer:
    """One run of one process.

    Args:
        config: With the vocabulary resolved.
        device: Of this process.
    """

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self.console = Console(dist.get_rank())
        self.train_set, self.valid_set = open_datasets(config)
        self.claim = claim_folder(Path(config.train.output))
        self.trainable: Trainable = build_trainable(config)
        self.mesh = self.trainable.context.mesh
        self.step = self.consumed_samples = 0
        self.history: list[dict] = []
        self.checkpoint: Path | None = None
        self._resume()
        self.first_step = self.step
        self.recorder = self._open_recorder() if dist.get_rank() == 0 else None
        self.flops_per_token = train_flops_per_token(config.model, config.data.seq_length)
        self.recent_seconds: deque[float] = deque(maxlen=config.train.log_interval)
        self.scalars: dict = {}
        self.skipped_in_a_row = 0

    def _resume(self) -> None:
        train = self.config.train
        path = store.find_together(train.output)
        if path is None:
            if train.resume == "must":
                raise UserError(f"train.resume is must, but {store.folder_of(train.output)} holds no checkpoint.")
            return
        if train.resume == "never":
            raise UserError(f"{path.parent} holds a checkpoint and train.resume is never. Choose another train.output, "
                            "or set train.resume to auto to go on from it.")
        meta = store.load(self.trainable, self.config, path)
        self.step, self.consumed_samples, self.history = meta["step"], meta["consumed_samples"], meta["validation"]
        self.checkpoint = path
        self.console.say(f"resumed from {path} at step {self.step}")
        for difference in store.inexact_settings(self.config, store.describe(path)[0]):
            self.console.say(f"  note: this run is not the continuation it would have been: {difference}")

    def _open_recorder(self) -> Recorder:
        output = Path(self.config.train.output)
        save_config(self.config, output / "config.yaml")
        return Recorder(output, self.first_step, self.config.train.tensorboard)

    def batches(self, dataset, consumed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Micro-batches (tokens, targets) of this data-parallel rank, each [micro_batch_size, seq_length]."""
        sampler = BatchSampler(len(dataset), consumed, self.config.train.micro_batch_size, self.mesh.data_rank,
                               self.mesh.data_size)
        for batch in read_batches(dataset, sampler):
            tokens = torch.from_numpy(batch)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def run(self, stop_requested: Callable[[], str | None]) -> None:
        """Trains to the last step, or until asked to stop; then saves and writes the summary.

        Args:
            stop_requested: Called on every rank after each step; the reason to stop, or None.
        """
        train = self.config.train
        self._describe()
        if self.step == train.steps:
            self.console.say(f"nothing to do: {self.checkpoint} is step {self.step} of {train.steps}.")
            if self.recorder and not self.recorder.is_finished():  # killed after the last checkpoint
                self._finish(None, 0.0)
            return
        started = time.monotonic()
        # Before the first step, and where the run was stopped before an evaluation that was due.
        if self._due(train.eval_interval) and (not self.history or self.history[-1]["step"] < self.step):
            self._evaluate()
        batches = self.batches(self.train_set, self.consumed_samples)
        reason = None
        while self.step < train.steps and reason is None:
            self._train_step(batches)
            reason = self._reason_to_stop(stop_requested)
            last = self.step == train.steps
            # A job that was told to stop has little time left: first it saves.
            if last or (self._due(train.eval_interval) and not reason):
                self._evaluate()
            if last or reason or self._due(train.save_interval):
                self._save()
        self._finish(reason, time.monotonic() - started)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _reason_to_stop(self, stop_requested: Callable[[], str | None]) -> str | None:
        exit_after, signal = self.config.train.exit_after, stop_requested()
        if self.step == self.config.train.steps:
            return None
        if exit_after and self.step - self.first_step >= exit_after:
            return f"train.exit_after {exit_after} steps"
        return signal

    def _describe(self) -> None:
        mesh, plan, trainable = self.mesh, self.trainable.context.plan, self.trainable
        self.console.say(
            f"{plan.layers} layers ({plan.dense_layers} dense, {plan.sparse_layers} sparse at 1/{plan.K}), active "
            f"depth {float(plan.active_layers):g} | tensor {mesh.tensor_size} x pipeline {mesh.pipeline_size} x data "
            f"{mesh.data_size} | stages {trainable.bounds}, heaviest {trainable.imbalance:.2f}x the mean | "
            f"{self.config.train.precision} on {self.device.type}, ZeRO {self.config.parallel.zero_stage}")
        self.console.say(describe(trainable.kernels, self.config.kernels.compile))

    def _train_step(self, batches: Iterator) -> None:
        """One optimizer step; on steps that are logged, with routing statistics."""
        train, engine, context = self.config.train, self.trainable.engine, self.trainable.context
        logged = (self.step + 1) % train.log_interval == 0 or self.step + 1 == train.steps
        context.statistics = {} if logged else None
        skipped, started = engine.skipped_steps, time.perf_counter()
        loss = engine.train_batch(batches).item()  # waits for the device, so the clock is true
        self.recent_seconds.append(time.perf_counter() - started)
        self.step += 1
        self.consumed_samples += train.global_batch_size
        self._guard(loss, engine.skipped_steps > skipped)
        self._measure(loss)
        if logged:
            self._log(gather_routing(context.statistics, self.mesh))
            context.statistics = None

    def _guard(self, loss: float, skipped: bool) -> None:
        """Stops a run that has gone wrong; all ranks see the same numbers."""
        if not math.isfinite(loss):
            raise UserError(f"the loss of step {self.step} is {loss}. Nothing was saved after it; resume from the "
                            "last checkpoint with a lower learning rate, or look at the data of this step.")
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self.console.say(f"step {self.step}: the gradient is not finite; the parameters stay as they were")
        if self.skipped_in_a_row == _SKIPPED_STEPS_IN_A_ROW:
            raise UserError(f"the gradients of {_SKIPPED_STEPS_IN_A_ROW} steps in a row, up to step {self.step}, were "
                            "not finite. Resume from the last checkpoint with a lower learning rate.")

    def _measure(self, loss: float) -> None:
        data, engine = self.config.data, self.trainable.engine
        tokens_per_step = self.config.train.global_batch_size * data.seq_length
        speed = tokens_per_step * len(self.recent_seconds) / sum(self.recent_seconds)
        self.scalars = {
            "tokens": self.consumed_samples * data.seq_length, "loss": loss, **self.trainable.learning_rates(),
            "grad_norm": float(engine.get_global_grad_norm()), "skipped_steps": engine.skipped_steps,
            "tokens_per_second": speed, "flops_per_second": speed * self.flops_per_token}

    def _log(self, routing: dict) -> None:
        self.scalars["memory_bytes"] = peak_memory(self.device)
        left = (self.config.train.steps - self.step) * sum(self.recent_seconds) / len(self.recent_seconds)
        self.console.step(self.step, self.config.train.steps, self.scalars, summarise_routing(routing), left)
        if self.recorder:
            self.recorder.record(self.step, self.scalars, routing)

    def _evaluate(self) -> None:
        count = self.config.train.eval_batches
        if not count:
            return
        found = {"step": self.step, **evaluate(self.trainable, lambda: self.batches(self.valid_set), count)}
        self.history.append(found)
        causal = found["routing_causal"]
        rule = f"; the causal rule takes {causal['selected']:.4f} of tokens, F1 {causal['f1']:.3f}" if causal else ""
        self.console.say(f"validation at step {self.step}: causal {found['loss_causal']:.4f}, top-k "
                         f"{found['loss_topk']:.4f}, gap {found['loss_causal'] - found['loss_topk']:+.4f}{rule}")
        if self.recorder:
            self.recorder.record_validation(found)

    def _save(self) -> None:
        self.checkpoint = store.save(self.trainable.engine, self.config, self.step, self.consumed_samples, self.history)
        self.console.say(f"saved {self.checkpoint}")

    def _finish(self, reason: str | None, seconds: float) -> None:
        if reason:
            self.console.say(f"stopped at step {self.step} of {self.config.train.steps}: {reason}. The same command "
                             "goes on from here.")
        if self.recorder:
            final = {**(self.history[-1] if self.history else {}), "step": self.step, **self.scalars,
                     "finished": self.step == self.config.train.steps, "seconds": seconds,
                     "checkpoint": str(self.checkpoint)}
            self.recorder.finish({"validation": self.history, "final": final})
