"""Parameters, FLOPs and bytes of a model, from its configuration alone. Pure Python.

A multiply-add is 2 FLOPs. Matrix products and attention products are counted; norms, rotations, softmax, gates and
gathers are not. Attention of n queries over m keys each costs 4*n*m*(heads*head_dim): scores, then the weighted sum.

Two ways of counting stand side by side. *Paper*: forward only, every query sees every key of its layer, embedding and
head left out (X-MoD, arXiv 2609.34212); this is phi of its tables. *True*: what is really computed, router and padded
head included, attention causal unless asked otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_xmod.config.schema import Config, ModelConfig
from megatron_xmod.depth import DepthPlan, plan_depth
from megatron_xmod.errors import UserError


def model_plan(model: ModelConfig) -> DepthPlan:
    """The layout that the configuration asks for. Raises UserError where it can't be built."""
    return plan_depth(model.active_layers, model.prefix_layers, model.routing.K, model.routing.A)


def dense_twin(model: ModelConfig) -> ModelConfig:
    """The dense model with the same width and active depth: what the paper's FLOPs ratios are relative to."""
    return replace(model, prefix_layers=None)


def layer_matrices(model: ModelConfig) -> int:
    """Elements of one layer's matrices, dense or sparse: query and output, key and value, and SwiGLU's three."""
    d = model.hidden_size
    return 2 * d * attention_width(model) + 2 * d * model.kv_heads * model.head_dim + 3 * d * model.ffn_size


def attention_width(model: ModelConfig) -> int:
    """Width of all query heads together."""
    return model.heads * model.head_dim


def total_params(model: ModelConfig) -> int:
    """The paper's N: the layers' matrices, embedding and head; norms, routers and scales left out."""
    return layer_matrices(model) * model_plan(model).layers + 2 * _vocab_size(model) * model.hidden_size


def active_params(model: ModelConfig) -> int:
    """The paper's N_act: as N, with each sparse layer counted 1/K."""
    active = layer_matrices(model) * model_plan(model).active_layers
    return int(active) + 2 * _vocab_size(model) * model.hidden_size


def stored_params(model: ModelConfig) -> int:
    """Every parameter the program stores: N, and norms, routers, scales, and the vocabulary's padding."""
    plan = model_plan(model)
    norms = 2 * model.hidden_size + 2 * model.head_dim
    router = model.hidden_size + model.routing.router_bias + model.routing.residual_scale
    layers = plan.layers * (layer_matrices(model) + norms) + plan.sparse_layers * router
    return layers + model.hidden_size + 2 * _padded_vocab_size(model) * model.hidden_size


def state_bytes(config: Config) -> dict[str, int]:
    """Bytes of one replica's training state (all tensor and pipeline ranks together), before ZeRO shares any.

    bf16 keeps 2-byte weights, 4-byte gradient sums, and 4-byte master weights beside the optimizer's moments. AdamW has
    two moments, Muon one for the layers' matrices. Activations are not included.
    """
    params = stored_params(config.model)
    number = 8 if config.train.precision == "fp64" else 4
    half = config.train.precision == "bf16"
    moments = 2 * params
    if config.optimizer.name == "muon":
        moments -= layer_matrices(config.model) * model_plan(config.model).layers
    return {
        "weights": (2 if half else number) * params,
        "gradients": number * params,
        "optimizer": number * (moments + (params if half else 0)),
    }


def flops_per_token_paper(model: ModelConfig, seq_length: int) -> float:
    """The paper's phi, in FLOPs per token of a sequence of `seq_length` tokens (see the top of the file)."""
    plan = model_plan(model)
    linear = 2 * layer_matrices(model) * (plan.dense_layers + plan.sparse_layers / plan.K)
    attention = 4 * seq_length * attention_width(model) * (plan.dense_layers + plan.sparse_layers / plan.K**2)
    return linear + attention


def flops_ratio_to_dense(model: ModelConfig, seq_length: int) -> float:
    """phi over phi of the dense twin."""
    return flops_per_token_paper(model, seq_length) / flops_per_token_paper(dense_twin(model), seq_length)


def train_flops_per_token(model: ModelConfig, seq_length: int, causal: bool = True) -> float:
    """True FLOPs per token of forward and backward, which costs twice the forward. Recomputation is not counted."""
    return 3 * sum(layer_flops(model, seq_length, causal)) / seq_length


def layer_flops(model: ModelConfig, seq_length: int, causal: bool = True) -> list[int]:
    """True forward FLOPs of one sequence for each unit of the layer list that the pipeline cuts.

    Units: embedding, prefix_layers blocks, one anchor group each (its sparse layers and its anchor), final norm, head.
    """
    plan = model_plan(model)
    dense = _block_flops(model, seq_length, causal)
    sparse = _block_flops(model, seq_length // plan.K, causal) + 2 * model.hidden_size * seq_length
    groups = [size * sparse + dense for size in plan.groups]
    head = 2 * model.hidden_size * _padded_vocab_size(model) * seq_length
    return [0] + [dense] * plan.prefix_layers + groups + [0, head]


def _block_flops(model: ModelConfig, tokens: int, causal: bool) -> int:
    """Forward FLOPs of one block on a sequence of `tokens`; causally, a query sees (tokens+1)/2 keys on average."""
    pairs = tokens * (tokens + 1) // 2 if causal else tokens**2
    return 2 * layer_matrices(model) * tokens + 4 * attention_width(model) * pairs


def _vocab_size(model: ModelConfig) -> int:
    if model.vocab_size is None:
        raise UserError("Counting parameters and FLOPs needs model.vocab_size, but it is null. Set it to the number "
                        "of tokens of the tokenizer.")
    return model.vocab_size


def _padded_vocab_size(model: ModelConfig) -> int:
    _vocab_size(model)
    return model.padded_vocab_size
