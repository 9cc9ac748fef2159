"""Every setting of a run, as frozen dataclasses, one per topic. The docstrings are the `--help`.

Checks that need only one topic live in its `__post_init__`; checks across topics are in `Config.__post_init__`.
No torch here: the counting and data tools read it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_xmod.depth import plan_depth
from megatron_xmod.errors import UserError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class RoutingConfig:
    """Which tokens a sparse layer takes, and how its update is weighted.

    Args:
        mode: How the layers of a round share the tokens. soft: each layer picks from all tokens, earlier ones made less
            likely by bias_scale (X-MoD as published). exclusive: the layers of a round share no token, so they run as
            one batched layer.
        one_by_one: Run the layers of an exclusive round one after another: same function, slower; a reference.
        K: Inverse token sparsity: a sparse layer runs on 1/K of the tokens.
        A: Anchor stride: mean number of sparse updates a token gets between two dense anchors. A*K must be an integer.
        bias_scale: The paper's tau, in logits: how much each earlier selection in the group lowers a token's score
            (of exclusive rounds, selections in earlier rounds).
        router_bias: Whether the router logit has a learnable constant.
        gate: What the gate r multiplies. residual: x + r*(a + f) (X-MoD, and the MoD paper's eq. 1).
            ffn: x + a + r*f (MoD as in eq. 6 of the X-MoD paper).
        residual_scale: Whether each sparse layer has the learnable scale of X-MoD on its update.
        residual_scale_init: Initial value of that scale.
        loss_coefficient: Weight of the routing loss (binary cross-entropy of the threshold rule against the top-k set).
    """

    mode: Literal["soft", "exclusive"] = "soft"
    one_by_one: bool = False
    K: int = 8
    A: float = 4.0
    bias_scale: float = 0.5
    router_bias: bool = True
    gate: Literal["residual", "ffn"] = "residual"
    residual_scale: bool = True
    residual_scale_init: float = 1.0
    loss_coefficient: float = 1e-4

    def __post_init__(self):
        _require(self.K >= 1, f"model.routing.K is {self.K}; it must be at least 1.")
        _require(self.A > 0, f"model.routing.A is {self.A}; it must be above 0. For a dense model leave out "
                 "model.prefix_layers instead.")
        _require(self.bias_scale >= 0, f"model.routing.bias_scale is {self.bias_scale}; it must be 0 or more.")
        _require(self.loss_coefficient >= 0,
                 f"model.routing.loss_coefficient is {self.loss_coefficient}; it must be 0 or more.")
        _require(self.gate == "residual" or not self.residual_scale,
                 "model.routing.residual_scale scales the whole update, but model.routing.gate is 'ffn'. "
                 "Set model.routing.residual_scale to false, or the gate to 'residual'.")


@dataclass(frozen=True)
class ModelConfig:
    """The decoder: Qwen3-like blocks, dense or stacked as X-MoD.

    Args:
        hidden_size: Width d of the residual stream.
        ffn_size: Width of the SwiGLU feed-forward.
        heads: Query heads.
        kv_heads: Key/value heads; divides `heads`.
        head_dim: Width of one head; even. heads*head_dim need not equal hidden_size.
        vocab_size: Number of tokens. null takes it from the tokenizer (data.tokenizer).
        vocab_multiple: The embedding and the head are padded to a multiple of this; padded tokens are never predicted.
        active_layers: Layers an average token passes.
        prefix_layers: Dense layers before the first sparse one (the paper's N0). null: every layer is dense.
        rope_theta: Base of the rotary position embedding.
        norm_eps: Added to the mean square in RMSNorm.
        init_std: Standard deviation of initial weights. Output projections use init_std / sqrt(2 * active_layers).
        routing: The sparse layers.
    """

    hidden_size: int = 512
    ffn_size: int = 1536
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    vocab_size: int | None = 50257
    vocab_multiple: int = 128
    active_layers: int = 28
    prefix_layers: int | None = 4
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    init_std: float = 0.02
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def __post_init__(self):
        for name in ("hidden_size", "ffn_size", "heads", "kv_heads", "head_dim", "vocab_multiple", "active_layers"):
            _require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        _require(self.heads % self.kv_heads == 0,
                 f"model.heads ({self.heads}) must be a multiple of model.kv_heads ({self.kv_heads}).")
        _require(self.head_dim % 2 == 0, f"model.head_dim is {self.head_dim}; rotary positions need an even one.")
        _require(self.vocab_size is None or self.vocab_size >= 1,
                 f"model.vocab_size is {self.vocab_size}; it must be at least 1.")
        for name in ("rope_theta", "norm_eps", "init_std"):
            _require(getattr(self, name) > 0, f"model.{name} is {getattr(self, name)}; it must be above 0.")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True)
class DataConfig:
    """What the model is trained on.

    Args:
        paths: Prefixes of .bin/.idx shards. Several are blended; put each one's weight in data.weights.
        weights: One positive number per path; null blends by size.
        split: Shares of the documents for training, validation and test.
        seq_length: Tokens per sequence, L.
        tokenizer: Kind of tokenizer: sentencepiece, hf or bytes. null: no tokenizer (model.vocab_size is needed).
        tokenizer_path: The tokenizer's file.
        seed: Of the order of documents and samples.
        samples: Training samples that the order is made for, at least those of the run; null: those of the run. Where
            the text is passed more than once, the order depends on it: runs of different lengths see the same samples
            first if it is the same.
    """

    paths: list[str] = field(default_factory=list)
    weights: list[float] | None = None
    split: str = "969,30,1"
    seq_length: int = 4096
    tokenizer: Literal["sentencepiece", "hf", "bytes"] | None = None
    tokenizer_path: str | None = None
    seed: int = 1234
    samples: int | None = None

    def __post_init__(self):
        _require(self.seed >= 0, f"data.seed is {self.seed}; it must be 0 or more.")
        _require(self.seq_length >= 1, f"data.seq_length is {self.seq_length}; it must be at least 1.")
        _require(self.weights is None or len(self.weights) == len(self.paths),
                 f"data.weights has {len(self.weights or [])} numbers for {len(self.paths)} data.paths; "
                 "give one per path.")


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters move.

    Args:
        name: adamw, or muon (Muon for matrices, AdamW for the rest).
        lr: Learning rate of AdamW.
        muon_lr: Learning rate of Muon.
        betas: AdamW's decay rates.
        eps: AdamW's epsilon.
        weight_decay: Decoupled weight decay of matrices and embeddings; norms, biases and scales have none.
        momentum: Muon's momentum (Nesterov).
        newton_schulz_steps: Muon's iterations.
        rms_match: Muon's update is scaled to this root mean square.
        gradient_clipping: Largest global gradient norm; 0 switches clipping off.
        schedule: Learning rate after the warm-up: cosine, linear, constant, or wsd (constant, then linear decay).
        warmup_fraction: Share of the steps over which the learning rate rises from 0.
        decay_fraction: Share of the steps over which wsd decays, at the end.
        min_lr_ratio: Final learning rate over the highest.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-4
    muon_lr: float = 3.2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    rms_match: float = 0.2
    gradient_clipping: float = 1.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_fraction: float = 0.01
    decay_fraction: float = 0.2
    min_lr_ratio: float = 0.1

    def __post_init__(self):
        for name in ("lr", "muon_lr", "eps", "rms_match", "newton_schulz_steps"):
            _require(getattr(self, name) > 0, f"optimizer.{name} is {getattr(self, name)}; it must be above 0.")
        for name in ("weight_decay", "gradient_clipping"):
            _require(getattr(self, name) >= 0, f"optimizer.{name} is {getattr(self, name)}; it must be 0 or more.")
        for name in ("warmup_fraction", "decay_fraction", "min_lr_ratio"):
            _require(0 <= getattr(self, name) <= 1,
                     f"optimizer.{name} is {getattr(self, name)}; it is a share, 0 to 1.")
        _require(all(0 <= b < 1 for b in (*self.betas, self.momentum)),
                 "optimizer.betas and optimizer.momentum must be at least 0 and below 1.")


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is shared. data parallel size = processes / (tensor_parallel_size * pipeline_parallel_size).

    Args:
        tensor_parallel_size: Processes that share each matrix.
        pipeline_parallel_size: Pipeline stages; cut only at dense layers, balanced by FLOPs.
        zero_stage: DeepSpeed ZeRO stage: 0, or 1 (optimizer state sharded over data-parallel ranks).
        recompute: Whether backward recomputes blocks and sparse rounds instead of keeping their activations.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    zero_stage: Literal[0, 1] = 1
    recompute: bool = False

    def __post_init__(self):
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            _require(getattr(self, name) >= 1, f"parallel.{name} is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True)
class TrainConfig:
    """The length of the run and its rhythm.

    Args:
        steps: Optimizer steps.
        global_batch_size: Sequences per optimizer step, over all processes.
        micro_batch_size: Sequences per forward pass of one process.
        precision: Numbers of weights and activations. bf16 keeps fp32 master weights; fp64 is for tests.
        device: auto takes CUDA where there is a GPU.
        seed: Of the initial weights (data.seed is that of the order of the data).
        log_interval: Steps between two log lines.
        eval_interval: Steps between two evaluations; 0 evaluates only at the end.
        eval_batches: Global batches per evaluation; 0 switches evaluation off.
        save_interval: Steps between two checkpoints; 0 saves only at the end.
        keep_checkpoints: How many of the newest checkpoints stay on disk; 0 keeps all.
        output: Folder of the run: checkpoints, logs, the resolved configuration.
        resume: auto goes on from the newest checkpoint in the output folder, if any; never refuses to overwrite one;
            must fails where there is none.
        exit_after: Stop, with a checkpoint, after this many steps in this process; 0 never.
        tensorboard: Whether TensorBoard files are written.
        timeout_minutes: How long a collective may wait for a peer before the job ends.
    """

    steps: int = 1000
    global_batch_size: int = 8
    micro_batch_size: int = 1
    precision: Literal["fp32", "bf16", "fp64"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 1234
    log_interval: int = 10
    eval_interval: int = 0
    eval_batches: int = 8
    save_interval: int = 0
    keep_checkpoints: int = 2
    output: str = "runs/default"
    resume: Literal["auto", "never", "must"] = "auto"
    exit_after: int = 0
    tensorboard: bool = True
    timeout_minutes: float = 10.0

    def __post_init__(self):
        for name in ("steps", "global_batch_size", "micro_batch_size", "log_interval"):
            _require(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("seed", "eval_interval", "eval_batches", "save_interval", "keep_checkpoints", "exit_after"):
            _require(getattr(self, name) >= 0, f"train.{name} is {getattr(self, name)}; it must be 0 or more.")
        _require(self.timeout_minutes > 0, f"train.timeout_minutes is {self.timeout_minutes}; it must be above 0.")


@dataclass(frozen=True)
class KernelsConfig:
    """What does each operation. auto takes the first named here that works on the device, with the run's numbers.

    Args:
        rms_norm: RMSNorm of all tokens. triton: a kernel of ours. apex: NVIDIA's FusedRMSNorm.
        gather_norm: Taking a layer's tokens and their RMSNorm. triton: one kernel of ours.
        scatter_add: Adding the gated update to the layer's tokens. triton: one kernel of ours.
        select: Sharing out the tokens of an exclusive round. triton: one kernel of ours for all its layers.
        attention: flash_attn: the package of that name, in bf16. sdpa: torch's scaled_dot_product_attention.
        adamw: torch_fused and torch_foreach: torch's own. apex: NVIDIA's FusedAdam, only where it is named.
        compile: Run dense blocks and the updates of sparse layers through torch.compile, which makes norms, gathering
            and scattering its own (auto then means torch for them).
    """

    rms_norm: Literal["auto", "triton", "apex", "torch"] = "auto"
    gather_norm: Literal["auto", "triton", "torch"] = "auto"
    scatter_add: Literal["auto", "triton", "torch"] = "auto"
    select: Literal["auto", "triton", "torch"] = "auto"
    attention: Literal["auto", "flash_attn", "sdpa"] = "auto"
    adamw: Literal["auto", "torch_fused", "torch_foreach", "apex"] = "auto"
    compile: bool = False


@dataclass(frozen=True)
class Config:
    """A whole run.

    Args:
        model: The model.
        data: The data.
        optimizer: The optimizer and the learning-rate schedule.
        parallel: The parallel layout.
        train: Length, batch, precision, files.
        kernels: Which implementation does each operation.
        deepspeed: Extra keys for DeepSpeed's configuration. A key that is derived from the settings above is refused.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        model = self.model
        plan_depth(model.active_layers, model.prefix_layers, model.routing.K, model.routing.A)
        sparse = model.prefix_layers is not None
        _require(not sparse or self.data.seq_length % self.model.routing.K == 0,
                 f"data.seq_length ({self.data.seq_length}) must be a multiple of model.routing.K "
                 f"({self.model.routing.K}); the nearest are "
                 f"{_nearest_multiples(self.data.seq_length, self.model.routing.K)}.")
        needed = self.train.steps * self.train.global_batch_size
        _require(self.data.samples is None or self.data.samples >= needed, f"data.samples is {self.data.samples}, but "
                 f"train.steps * train.global_batch_size is {needed}. Set it to that or more, or to null.")
        tp = self.parallel.tensor_parallel_size
        for name in ("heads", "kv_heads", "ffn_size"):
            value = getattr(self.model, name)
            _require(value % tp == 0, f"model.{name} ({value}) must be a multiple of "
                     f"parallel.tensor_parallel_size ({tp}).")
        _require(self.model.vocab_multiple % tp == 0, f"model.vocab_multiple ({self.model.vocab_multiple}) must be a "
                 f"multiple of parallel.tensor_parallel_size ({tp}).")
        _require(tp == 1 or not self.kernels.compile, "kernels.compile makes one graph of a block, which the "
                 f"collectives of parallel.tensor_parallel_size {tp} would cut. Set kernels.compile to false.")
        if self.optimizer.name == "muon":
            _require(tp == 1, "optimizer.name muon works on whole matrices, but parallel.tensor_parallel_size is "
                     f"{tp}. Use adamw, or tensor_parallel_size 1.")
            _require(self.parallel.zero_stage == 0, "optimizer.name muon works on whole matrices, but ZeRO stage 1 "
                     "shards them. Set parallel.zero_stage to 0, or use adamw.")
        _require(self.train.precision != "fp64" or self.parallel.zero_stage == 0, "train.precision is fp64, but ZeRO "
                 "stage 1 keeps its weights in fp32. Set parallel.zero_stage to 0.")
        if self.train.precision == "bf16":
            _require(self.parallel.zero_stage == 1, "train.precision bf16 keeps its fp32 master weights in ZeRO stage "
                     "1. Set parallel.zero_stage to 1, or train.precision to fp32.")


def _nearest_multiples(value: int, of: int) -> str:
    below = value // of * of
    return " and ".join(str(v) for v in (below, below + of) if v > 0)
