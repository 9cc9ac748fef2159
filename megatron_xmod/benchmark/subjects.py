"""What is timed: models of the program by variant, and a peer. Each does the phases of a training step on its own.

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_xmod.config.load import load_config
from megatron_xmod.config.schema import Config
from megatron_xmod.errors import UserError
from megatron_xmod.flops import model_plan, train_flops_per_token
from megatron_xmod.kernels.registry import choose_names, load
from megatron_xmod.model.build import Transformer
from megatron_xmod.model.context import ModelContext
from megatron_xmod.parallel.loss import cross_entropy
from megatron_xmod.parallel.mesh import Mesh
from megatron_xmod.train.optimizer import build_optimizer

MODES = ("soft", "exclusive")
_VARIANTS = Path(__file__).parents[2] / "examples" / "configs" / "variant"


@dataclass
class Subject:
    """A model and its optimizer.

    Attributes:
        loss: Tokens [B, S + 1] -> mean loss.
        flops_per_token: FLOPs of a training step that kernels do: attention causal, head included, three times forward.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor], Tensor]
    flops_per_token: float

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Brings model and optimizer to the device, and back to the CPU after: the others leave it the memory."""
        self._move(device)
        try:
            yield
        finally:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values():
            state.update({name: value.to(device) for name, value in state.items()})

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def variant_config(base: list[str], variant: str, overrides: list[str]) -> Config:
    """The configuration of a variant: "dense", "mod", "soft:a4k8", "exclusive:a3k16" laid over the base files.

    Args:
        base: Configuration files.
        variant: [mode:]name, where the name is aAkK for numbers A and K, or that of a file of examples/configs/variant,
            or a path.
        overrides: Command-line overrides, laid over all.
    """
    mode, _, name = variant.rpartition(":")
    if mode and mode not in MODES:
        raise UserError(f"the variant {variant!r} has mode {mode!r}; it is one of {', '.join(MODES)}.")
    settings = ["--model.routing.mode", mode] if mode else []
    xmod, files = re.fullmatch(r"a([\d.]+)k(\d+)", name), base
    if xmod:
        settings += ["--model.routing.A", xmod[1], "--model.routing.K", xmod[2]]
    else:
        files = [*base, name if name.endswith(".yaml") else str(_VARIANTS / f"{name}.yaml")]
    config = load_config([*(word for path in files for word in ("--config", path)), *settings, *overrides])
    model = config.model
    if (xmod or model.prefix_layers is not None) and not model_plan(model).groups:
        raise UserError(f"the variant {variant!r} has no sparse layer with model.active_layers {model.active_layers} "
                        f"and model.prefix_layers {model.prefix_layers}: it would be dense. Raise model.active_layers.")
    return config


def xmod_subject(name: str, config: Config, device: torch.device, dtype: torch.dtype) -> Subject:
    """A model of this program in one process."""
    kernels = load(choose_names(config, device, dtype))
    context = ModelContext(config.model, recompute=config.parallel.recompute, kernels=kernels,
                           compile=config.kernels.compile)
    model = Transformer(context, config.train.seed).to(dtype)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, Mesh(), zero_stage=0, adamw=kernels.adamw)

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:], config.model.vocab_size, context.mesh).mean()

    return Subject(name, model, optimizer, loss, train_flops_per_token(config.model, config.data.seq_length))


def hf_subject(name: str, config: Config, device: torch.device, dtype: torch.dtype) -> Subject:
    """The dense model of the same shape in `transformers` (Qwen3), under the same optimizer and clipping.

    Args:
        name: "hf" for SDPA, "hf:eager" for the attention that is written out.
    """
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        raise UserError("--peer hf needs the package transformers: pip install transformers") from None
    model = config.model
    shape = Qwen3Config(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.ffn_size,
        num_hidden_layers=model.active_layers, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, rope_theta=model.rope_theta, rms_norm_eps=model.norm_eps, tie_word_embeddings=False,
        max_position_embeddings=config.data.seq_length, use_cache=False,
        attn_implementation="eager" if name == "hf:eager" else "sdpa")
    peer = Qwen3ForCausalLM(shape).to(dtype)
    tables = {peer.get_input_embeddings().weight, peer.get_output_embeddings().weight}
    for parameter in peer.parameters():  # what our optimizer reads of a parameter
        kind = "matrix" if parameter.dim() == 2 else "other"
        parameter.kind, parameter.tensor_parallel_dim = "embedding" if parameter in tables else kind, None
    kernels = load(choose_names(config, device, dtype))
    optimizer = build_optimizer(peer.named_parameters(), config.optimizer, Mesh(), zero_stage=0, adamw=kernels.adamw)

    def loss(tokens: Tensor) -> Tensor:
        logits = peer(tokens[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    dense = replace(model, prefix_layers=None)
    return Subject(name, peer, optimizer, loss, train_flops_per_token(dense, config.data.seq_length))


def make_tokens(config: Config, batch: int, device: torch.device) -> Iterator[Tensor]:
    """Endless random tokens [B, S + 1]."""
    generator = torch.Generator().manual_seed(0)
    while True:
        shape = (batch, config.data.seq_length + 1)
        yield torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
