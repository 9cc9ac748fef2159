"""Whether two configurations are the same experiment."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from megatron_xmod.config.load import config_to_dict
from megatron_xmod.config.schema import Config, RoutingConfig
from megatron_xmod.flops import model_plan

# Settings of the train section that leave the results as they are.
_RHYTHM = ("output", "resume", "exit_after", "log_interval", "save_interval", "keep_checkpoints", "tensorboard",
           "timeout_minutes")


def is_dense(config: Config) -> bool:
    return not model_plan(config.model).groups


def essence(config: Config) -> dict[str, Any]:
    """All settings that results depend on, by their full names. Routing counts only where there are sparse layers."""
    tree = config_to_dict(config)
    del tree["kernels"]  # they differ in speed, and in rounding as any two machines do
    for name in _RHYTHM:
        del tree["train"][name]
    if is_dense(config):
        tree["model"] |= {"prefix_layers": None, "routing": asdict(RoutingConfig())}
    return dict(_flat(tree))


def config_hash(config: Config) -> str:
    """12 hexadecimal digits, the same for the same experiment."""
    return hashlib.sha256(json.dumps(essence(config), sort_keys=True).encode()).hexdigest()[:12]


def differences(there: Config, here: Config) -> list[str]:
    """In words, the settings in which two experiments differ."""
    then, now = essence(there), essence(here)
    return [f"{name} is {then.get(name)} there, {now.get(name)} here"
            for name in {**then, **now} if then.get(name) != now.get(name)]


def _flat(tree: dict[str, Any], prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
