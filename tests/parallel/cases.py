"""What the ranks of a pool run, and the one-process reference it is compared with.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor

from megatron_xmod.config.schema import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_xmod.config.schema import RoutingConfig as Routing
from megatron_xmod.model import sparse
from megatron_xmod.model.build import Transformer
from megatron_xmod.model.context import ModelContext
from megatron_xmod.parallel.loss import cross_entropy

BATCH = 8
LENGTH = 32
# Two groups of one round of four layers and a round of two; the true vocabulary is smaller than the padded one.
MODEL = ModelConfig(hidden_size=32, ffn_size=48, heads=4, kv_heads=2, head_dim=8, vocab_size=61, vocab_multiple=16,
                    active_layers=6, prefix_layers=1, init_std=0.1,
                    routing=Routing(K=4, A=1.5, loss_coefficient=0.05))


def make_config(tensor: int = 1, pipeline: int = 1, accumulation: int = 1, data: int = 1, *, precision: str = "fp64",
                zero_stage: int = 0, recompute: bool = False, optimizer: str = "adamw",
                kind: str = "soft") -> Config:
    """A toy run with a global batch of BATCH sequences; the kind is dense or a mode of routing."""
    model = replace(MODEL, prefix_layers=None) if kind == "dense" else \
        replace(MODEL, routing=replace(MODEL.routing, mode=kind))
    return Config(
        model=model, data=DataConfig(seq_length=LENGTH),
        # AdamW divides by |gradient| + eps: with the usual eps the rounding error of a gradient near 0 becomes an
        # update as large as any other.
        optimizer=OptimizerConfig(name=optimizer, lr=1e-2, muon_lr=1e-2, eps=1e-5, gradient_clipping=0.5,
                                  schedule="constant", warmup_fraction=0.0),
        parallel=ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, zero_stage=zero_stage,
                                recompute=recompute),
        train=TrainConfig(steps=100, global_batch_size=BATCH, micro_batch_size=BATCH // data // accumulation,
                          precision=precision, device="cpu"))


def make_tokens(step: int) -> Tensor:
    """[BATCH, LENGTH + 1] token ids, the same everywhere."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, MODEL.vocab_size, (BATCH, LENGTH + 1), generator=generator)


def _micro_batches(config: Config, mesh, steps: int):
    size = config.train.micro_batch_size
    for step in range(steps):
        for first in range(mesh.data_rank * size, BATCH, size * mesh.data_size):
            tokens = make_tokens(step)[first:first + size]
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(config: Config, steps: int) -> dict:
    """Trains under the engine; runs on every rank.

    Returns:
        losses and norms per step; gradients of the first step and final parameters, {name: (tensor parallel dimension,
        tensor rank, shard)}, names as in `Transformer`.
    """
    from deepspeed.utils import safe_get_full_grad

    from megatron_xmod.train.engine import build_trainable

    trainable = build_trainable(config)
    engine, mesh = trainable.engine, trainable.context.mesh
    gradients: dict = {}
    take_step = engine._take_model_step

    def take_step_and_look(*args):
        if not gradients:
            for name, p in engine.module.named_parameters():
                gradient = p.grad if config.parallel.zero_stage == 0 else safe_get_full_grad(p)
                gradients[name] = _with_place(p, gradient, mesh)
        take_step(*args)

    engine._take_model_step = take_step_and_look
    batches = _micro_batches(config, mesh, steps)
    losses, norms = [], []
    for _ in range(steps):
        loss = engine.train_batch(batches)
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    parameters = {name: _with_place(p, p.data, mesh) for name, p in engine.module.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": parameters}


def _with_place(parameter, value: Tensor, mesh) -> tuple:
    # Numpy: tensors sent through a pipe would stay in shared memory of a process that may be gone.
    return parameter.tensor_parallel_dim, mesh.tensor_rank, value.detach().float().numpy().copy() \
        if value.dtype == torch.bfloat16 else value.detach().numpy().copy()


def join(results: list[dict], what: str) -> dict[str, Tensor]:
    """Whole tensors from the ranks' shards; copies must be the same bits."""
    places: dict[str, dict] = {}
    for result in results:
        for name, (dim, rank, value) in result[what].items():
            value = torch.from_numpy(value)
            seen = places.setdefault(name, {"dim": dim, "shards": {}})["shards"]
            key = rank if dim is not None else 0
            assert key not in seen or torch.equal(seen[key], value), f"copies of {name} differ"
            seen[key] = value
    return {f"layers.{name}": place["shards"][0] if place["dim"] is None else
            torch.cat([place["shards"][r] for r in sorted(place["shards"])], place["dim"])
            for name, place in places.items()}


def reference(steps: int, precision: str, optimizer: str, kind: str) -> dict:
    """The same training in this process with nothing but torch: no engine, no groups, the whole batch at once.

    Returns:
        As `train`, and `margin`: how far, relative to the largest score, the scores just above and just below the cut
        of any selection of any step are apart (soft routing).
    """
    config = make_config(precision=precision, optimizer=optimizer, kind=kind)
    context = ModelContext(config.model)
    model = Transformer(context, config.train.seed).to(torch.float64 if precision == "fp64" else torch.float32)
    optimizers = _torch_optimizers(model, config)
    losses, norms, margins, gradients = [], [], [], {}
    for step in range(steps):
        tokens = make_tokens(step)
        with _watch_margins(margins):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits, tokens[:, 1:], config.model.vocab_size, context.mesh).mean()
        model.zero_grad()
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.gradient_clipping)
        for torch_optimizer in optimizers:
            torch_optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "margin": min(margins, default=None),
            "parameters": {name: p.detach().clone() for name, p in model.named_parameters()}}


@contextlib.contextmanager
def _watch_margins(margins: list[float]):
    select = sparse.select_top_k

    def select_and_look(score_BS, count, kernel):
        ranked = score_BS.detach().sort(descending=True).values
        margins.append(((ranked[:, count - 1] - ranked[:, count]) / ranked.abs().amax(1)).min().item())
        return select(score_BS, count, kernel)

    sparse.select_top_k = select_and_look
    yield
    sparse.select_top_k = select


def _torch_optimizers(model: Transformer, config: Config) -> list:
    settings = config.optimizer
    kinds = {kind: [p for p in model.parameters() if p.kind == kind] for kind in ("matrix", "embedding", "other")}
    muon = settings.name == "muon"
    adamw = torch.optim.AdamW(
        [{"params": kinds["embedding"] + ([] if muon else kinds["matrix"]), "weight_decay": settings.weight_decay},
         {"params": kinds["other"], "weight_decay": 0.0}], lr=settings.lr, betas=settings.betas, eps=settings.eps)
    return [adamw, _Muon(kinds["matrix"], settings)] if muon else [adamw]


class _Muon:
    """Muon as its author's recipe says, one matrix at a time."""

    def __init__(self, parameters: list[Tensor], settings: OptimizerConfig):
        self.settings, self.parameters = settings, parameters
        self.averages = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        for p, average in zip(self.parameters, self.averages, strict=True):
            average.mul_(self.settings.momentum).add_(p.grad, alpha=1 - self.settings.momentum)
            direction = (1 - self.settings.momentum) * p.grad + self.settings.momentum * average
            for matrix, whole in zip(direction.reshape(-1, *p.shape[-2:]), p.view(-1, *p.shape[-2:]), strict=True):
                update = self._orthogonalise(matrix) * self.settings.rms_match * max(matrix.shape) ** 0.5
                whole.mul_(1 - self.settings.muon_lr * self.settings.weight_decay)
                whole.add_(update, alpha=-self.settings.muon_lr)

    def _orthogonalise(self, matrix: Tensor) -> Tensor:
        """A quintic in the singular values, applied to them directly."""
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        s = s / s.norm()
        for _ in range(self.settings.newton_schulz_steps):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return u @ torch.diag(s) @ vh
