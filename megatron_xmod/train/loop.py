"""The training run: data, steps, evaluation, checkpoints, the end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_xmod.checkpoint import store
from megatron_xmod.config.load import save_config
from megatron_xmod.config.schema import Config
from megatron_xmod.data.build import build_datasets
from megatron_xmod.data.sampler import BatchSampler, read_batches
from megatron_xmod.data.tokenizer import load_tokenizer
from megatron_xmod.errors import UserError
from megatron_xmod.flops import train_flops_per_token
from megatron_xmod.train.engine import Trainable, build_trainable
from megatron_xmod.train.evaluate import evaluate
from megatron_xmod.train.metrics import Console, Recorder, gather_routing, memory_bytes, summarise_routing


def resolve_vocabulary(config: Config) -> Config:
    """The configuration with the true number of tokens in it.

    Raises:
        UserError: it is neither given nor told by a tokenizer, or the tokenizer has more.
    """
    if config.data.tokenizer is None:
        if config.model.vocab_size is None:
            raise UserError("model.vocab_size is null and there is no data.tokenizer to take it from. Set one of them.")
        return config
    size = load_tokenizer(config.data.tokenizer, config.data.tokenizer_path).vocab_size
    if config.model.vocab_size is None:
        return replace(config, model=replace(config.model, vocab_size=size))
    if size > config.model.vocab_size:
        raise UserError(f"the tokenizer {config.data.tokenizer_path} has {size} tokens, model.vocab_size is "
                        f"{config.model.vocab_size}. Set model.vocab_size to null to take the tokenizer's.")
    return config


def open_datasets(config: Config) -> tuple:
    """(training, validation) samples of data.seq_length + 1 tokens.

    Raises:
        UserError: nothing to train or validate on, or a broken shard.
    """
    batch, evaluated = config.train.global_batch_size, config.train.eval_batches
    wanted = (config.train.steps * batch, evaluated * batch, 0)
    train_set, valid_set, _ = build_datasets(config.data.paths, config.data.weights, config.data.split,
                                             config.data.seq_length, config.train.seed, wanted,
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
        self.trainable: Trainable = build_trainable(config)
        self.mesh = self.trainable.context.mesh
        self.history: list[dict] = []
        self.first_step = self._resume()
        self.step = self.first_step
        self.checkpoint: Path | None = None
        self.recorder = self._open_recorder() if dist.get_rank() == 0 else None
        self.flops_per_token = train_flops_per_token(config.model, config.data.seq_length)
        self.recent_seconds: deque[float] = deque(maxlen=config.train.log_interval)
        self.last_scalars: dict = {}

    def _resume(self) -> int:
        train = self.config.train
        path = store.find(train.output)
        if train.resume == "must" and path is None:
            raise UserError(f"train.resume is must, but {store.folder_of(train.output)} holds no checkpoint.")
        if path is None:
            return 0
        if train.resume == "never":
            raise UserError(f"{path.parent} holds a checkpoint and train.resume is never. Choose another train.output, "
                            "or set train.resume to auto to go on from it.")
        meta = store.load(self.trainable.engine, self.config, path)
        self.history = meta["validation"]
        self.console.say(f"resumed from {path} at step {meta['step']}")
        for difference in store.inexact_settings(self.config, store.describe(path)[0]):
            self.console.say(f"  note: this run is not the continuation it would have been: {difference}")
        return meta["step"]

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

    def run(self, stop_requested) -> None:
        """Trains to the last step, or until asked to stop; then saves and writes the summary.

        Args:
            stop_requested: Called on every rank after each step; the reason to stop, or None.
        """
        train = self.config.train
        started = time.monotonic()
        self._describe()
        if not self.history and train.eval_interval:
            self._evaluate()
        batches = self.batches(self.train_set, self.step * train.global_batch_size)
        reason = None
        while self.step < train.steps and reason is None:
            self._train_interval(batches)
            if self._due(train.eval_interval) or (self.step == train.steps and train.eval_batches):
                self._evaluate()
            reason = self._reason_to_stop(stop_requested)
            if self._due(train.save_interval) or self.step == train.steps or reason:
                self._save()
        self._finish(reason, time.monotonic() - started)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _reason_to_stop(self, stop_requested) -> str | None:
        exit_after = self.config.train.exit_after
        if exit_after and self.step - self.first_step >= exit_after and self.step < self.config.train.steps:
            return f"train.exit_after {exit_after} steps"
        return stop_requested()

    def _describe(self) -> None:
        mesh, plan, trainable = self.mesh, self.trainable.context.plan, self.trainable
        self.console.say(
            f"{plan.layers} layers ({plan.dense_layers} dense, {plan.sparse_layers} sparse at 1/{plan.K}), active "
            f"depth {float(plan.active_layers):g} | tensor {mesh.tensor_size} x pipeline {mesh.pipeline_size} x data "
            f"{mesh.data_size} | stages {trainable.bounds}, heaviest {trainable.imbalance:.2f}x the mean | "
            f"{self.config.train.precision} on {self.device.type}, ZeRO {self.config.parallel.zero_stage}")

    def _train_interval(self, batches: Iterator) -> None:
        """One optimizer step; on steps that are logged, with routing statistics."""
        train, engine, context = self.config.train, self.trainable.engine, self.trainable.context
        logged = (self.step + 1) % train.log_interval == 0 or self.step + 1 == train.steps
        context.statistics = {} if logged else None
        started = time.perf_counter()
        loss = engine.train_batch(batches)
        self.step += 1
        value = loss.item()  # waits for the device, so the clock is true
        self.recent_seconds.append(time.perf_counter() - started)
        if not math.isfinite(value):
            raise UserError(f"the loss of step {self.step} is {value}. Nothing was saved after it; resume from the "
                            "last checkpoint with a lower learning rate, or look at the data of this step.")
        if logged:
            self._log(value, gather_routing(context.statistics, self.mesh))
            context.statistics = None

    def _log(self, loss: float, routing: dict) -> None:
        train, engine = self.config.train, self.trainable.engine
        tokens_per_step = train.global_batch_size * self.config.data.seq_length
        speed = tokens_per_step * len(self.recent_seconds) / sum(self.recent_seconds)
        scalars = {
            "tokens": self.step * tokens_per_step, "loss": loss, "lr": engine.get_lr()[0],
            "grad_norm": float(engine.get_global_grad_norm()), "tokens_per_second": speed,
            "flops_per_second": speed * self.flops_per_token, "memory_bytes": memory_bytes(self.device)}
        self.last_scalars = scalars
        left = (train.steps - self.step) * sum(self.recent_seconds) / len(self.recent_seconds)
        self.console.step(self.step, train.steps, scalars, summarise_routing(routing), left)
        if self.recorder:
            self.recorder.record(self.step, scalars, routing)

    def _evaluate(self) -> None:
        count = self.config.train.eval_batches
        if not count:
            return
        losses = evaluate(self.trainable, lambda: self.batches(self.valid_set), count)
        self.history.append({"step": self.step, **losses})
        self.console.say(f"validation at step {self.step}: causal {losses['loss_causal']:.4f}, top-k "
                         f"{losses['loss_topk']:.4f}, gap {losses['loss_causal'] - losses['loss_topk']:+.4f}")
        if self.recorder:
            self.recorder.record_validation(self.step, losses)

    def _save(self) -> None:
        train = self.config.train
        self.checkpoint = store.save(self.trainable.engine, self.config, self.step, self.history,
                                     train.keep_checkpoints)
        self.console.say(f"saved {self.checkpoint}")

    def _finish(self, reason: str | None, seconds: float) -> None:
        if reason:
            self.console.say(f"stopped at step {self.step} of {self.config.train.steps}: {reason}. The same command "
                             "goes on from here.")
        if self.recorder:
            final = {**self.last_scalars, **(self.history[-1] if self.history else {}), "step": self.step,
                     "finished": self.step == self.config.train.steps, "seconds": seconds,
                     "checkpoint": str(self.checkpoint or store.find(self.config.train.output))}
            self.recorder.finish({"validation": self.history, "final": final})
