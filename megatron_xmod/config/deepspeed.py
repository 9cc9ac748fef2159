"""DeepSpeed's configuration, derived from the run's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_xmod.config.schema import Config
from megatron_xmod.errors import UserError

# What the program decides, and the setting that decides it. A section stands for everything in it.
_DERIVED = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_clipping": "optimizer.gradient_clipping",
    "optimizer": "optimizer.name",
    "scheduler": "optimizer.schedule",
    "zero_allow_untested_optimizer": "optimizer.name",
    "zero_optimization.stage": "parallel.zero_stage",
    "bf16.enabled": "train.precision",
    "fp16": "train.precision",
    "amp": "train.precision",
    "data_types.grad_accum_dtype": "train.precision",
    "communication_data_type": "train.precision",
    "steps_per_print": "train.log_interval",
    "wall_clock_breakdown": "train.log_interval",
    "tensorboard": "train.tensorboard",
}
_NEVER = 10**9


def deepspeed_config(config: Config, data_parallel_size: int) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize(config=...)`.

    Raises:
        UserError: for a batch the ranks can't share, and for a key in config.deepspeed that a setting decides.
    """
    precision, zero = config.train.precision, config.parallel.zero_stage
    derived = {
        "train_batch_size": config.train.global_batch_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation(config, data_parallel_size),
        "zero_optimization": {"stage": zero},
        # DeepSpeed's ZeRO-0 norm misses the parameters of later pipeline stages; there the optimizer clips.
        "gradient_clipping": config.optimizer.gradient_clipping if zero else 0.0,
        "zero_allow_untested_optimizer": True,  # ours; the parallel tests are its test
        # Gradients accumulated in fp32 would be rounded to bf16 for the reduction.
        "communication_data_type": "fp32",
        # DeepSpeed's own lines and timers: the loop logs, and the timers break with several pipeline stages.
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }
    if precision == "bf16":
        derived |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    for path in _leaf_paths(config.deepspeed):
        _refuse_derived(path)
    return deep_merge(derived, config.deepspeed)


def gradient_accumulation(config: Config, data_parallel_size: int) -> int:
    """Micro-batches of one process per optimizer step.

    Raises:
        UserError: where the global batch is no multiple of micro_batch_size * data_parallel_size.
    """
    assert data_parallel_size >= 1
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    share = micro * data_parallel_size
    if batch % share:
        below = batch // share * share
        near = " and ".join(str(size) for size in (below, below + share) if size)
        raise UserError(f"train.global_batch_size is {batch}, but {data_parallel_size} data-parallel ranks with "
                        f"train.micro_batch_size {micro} can only share a multiple of {share}. The nearest: {near}.")
    return batch // share


def deep_merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A new dictionary: `base` with `extra` laid over it, section by section."""
    merged = dict(base)
    for key, value in extra.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _leaf_paths(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaf_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _refuse_derived(path: str) -> None:
    for derived, setting in _DERIVED.items():
        # The second test is for a plain value in place of a section, as in `bf16: true`.
        if f"{path}.".startswith(f"{derived}.") or derived.startswith(f"{path}."):
            raise UserError(f"deepspeed.{path} can't be set: it follows from {setting}. Set that instead.")
