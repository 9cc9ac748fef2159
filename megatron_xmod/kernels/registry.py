"""Which implementation does each operation: found by what is really there, named at start-up, overridable in `kernels`.

Optional packages are imported only when something asks for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_xmod.config.schema import Config
from megatron_xmod.errors import UserError


class Place(NamedTuple):
    """Where kernels run and on what. The type is that of activations; AdamW takes any that parameters have."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    compile: bool = False


class Kernels(NamedTuple):
    """The chosen functions. Their signatures are those of `reference`, `attention.sdpa` and `adamw.torch_fused`."""

    rms_norm: Callable
    gather_norm: Callable
    scatter_add: Callable  # add_gated
    select: Callable  # select_round
    attention: Callable
    adamw: Callable


def _always(place: Place) -> str | None:
    return None


def _cuda(place: Place, capability: tuple[int, int] = (0, 0)) -> str | None:
    if place.device.type != "cuda":
        return f"it needs a CUDA device, and this run is on the {place.device.type.upper()}"
    found = torch.cuda.get_device_capability(place.device)
    if found < capability:
        return f"it needs a GPU of compute capability {capability[0]}.{capability[1]}, this one has " \
               f"{found[0]}.{found[1]}"
    return None


def _numbers(place: Place, *dtypes: torch.dtype) -> str | None:
    return None if place.dtype in dtypes else f"it does not work on {str(place.dtype).removeprefix('torch.')}"


def _package(module: str, *names: str) -> str | None:
    """Why the module can't be used: it is not there, broken, or lacks a name, as another package of its name does."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a build for another torch or CUDA fails in many ways
        return f"the module {module} can't be imported ({error})"
    lacking = [name for name in names if not hasattr(found, name)]
    return f"the module {module} has no {lacking[0]}" if lacking else None


def _apex(*needed: tuple[str, str]) -> str | None:
    for module, name in needed:
        reason = _package(module, name)
        if reason:
            return f"{reason}; it takes NVIDIA's apex, built with its CUDA extensions (PyPI's apex is another project)"
    return None


def _compiled(place: Place) -> str | None:
    return "kernels.compile is on, and torch.compile makes its own" if place.compile else None


def _triton_block(place: Place) -> str | None:
    return _compiled(place) or _triton(place)


def _triton(place: Place) -> str | None:
    return _cuda(place, (8, 0)) or _package("triton", "jit", "language")


def _apex_norm(place: Place) -> str | None:
    return _compiled(place) or _cuda(place) or _apex(
        ("apex.normalization.fused_layer_norm", "fused_rms_norm_affine"),
        ("fused_layer_norm_cuda", "rms_forward_affine"))


def _apex_adam(place: Place) -> str | None:
    return _cuda(place) or _apex(("apex.multi_tensor_apply", "multi_tensor_applier"), ("amp_C", "multi_tensor_adam"))


def _flash_attn(place: Place) -> str | None:
    if place.head_dim > 256:
        return f"it takes a head_dim of at most 256, and this model's is {place.head_dim}"
    return _compiled(place) or _cuda(place, (8, 0)) or _numbers(place, torch.float16, torch.bfloat16) \
        or _package("flash_attn", "flash_attn_func")


# Operation -> name in the configuration -> (why it can't be used, or None; where it is). auto takes the first that can.
IMPLEMENTATIONS: dict[str, dict[str, tuple[Callable[[Place], str | None], str]]] = {
    "rms_norm": {"triton": (_triton_block, "triton_norm:rms_norm"), "apex": (_apex_norm, "apex_norm:rms_norm"),
                 "torch": (_always, "reference:rms_norm")},
    "gather_norm": {"triton": (_triton_block, "triton_norm:gather_norm"), "torch": (_always, "reference:gather_norm")},
    "scatter_add": {"triton": (_triton_block, "triton_gated:add_gated"), "torch": (_always, "reference:add_gated")},
    "select": {"triton": (_triton, "triton_select:select_round"), "torch": (_always, "reference:select_round")},
    "attention": {"flash_attn": (_flash_attn, "attention:flash_attn"), "sdpa": (_always, "attention:sdpa")},
    "adamw": {"torch_fused": (_always, "adamw:torch_fused"), "torch_foreach": (_always, "adamw:torch_foreach"),
              "apex": (_apex_adam, "adamw:apex")},
}

# What needs no optional package and runs everywhere.
TORCH = {"rms_norm": "torch", "gather_norm": "torch", "scatter_add": "torch", "select": "torch", "attention": "sdpa",
         "adamw": "torch_fused"}


def choose_names(config: Config, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The name of the implementation of each operation.

    Args:
        dtype: Of weights and activations.

    Raises:
        UserError: one that the configuration names can't be used.
    """
    if config.kernels.compile and device.type == "cpu":
        _require_compiler()
    place, names = Place(device, dtype, config.model.head_dim, config.kernels.compile), {}
    for operation, choices in IMPLEMENTATIONS.items():
        wanted = getattr(config.kernels, operation)
        if wanted == "auto":
            names[operation] = next(name for name, (reason, _) in choices.items() if reason(place) is None)
            continue
        reason = choices[wanted][0](place)
        if reason:
            raise UserError(f"kernels.{operation} is {wanted}, which can't be used: {reason}. Set it to auto.")
        names[operation] = wanted
    return names


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError("kernels.compile needs a C++ compiler on the CPU and finds none. Install g++, or set it to "
                        "false.") from None


def load(names: dict[str, str]) -> Kernels:
    """The functions of the names."""
    return Kernels(**{operation: _function(IMPLEMENTATIONS[operation][name][1]) for operation, name in names.items()})


def describe(names: dict[str, str], compiled: bool) -> str:
    """One line for the start of a run."""
    line = "kernels: " + ", ".join(f"{operation} {name}" for operation, name in names.items())
    return f"{line}; blocks compiled" if compiled else line


def _function(where: str) -> Callable:
    module, name = where.split(":")
    return getattr(importlib.import_module(f"megatron_xmod.kernels.{module}"), name)
