import sys
from dataclasses import fields
from typing import get_args, get_type_hints

import fakes
import pytest
import torch

from megatron_xmod.config.schema import Config, KernelsConfig, ModelConfig
from megatron_xmod.errors import UserError
from megatron_xmod.kernels.registry import IMPLEMENTATIONS, TORCH, Kernels, choose_names, describe, load

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PACKAGES = ("triton", "apex", "fused_layer_norm_cuda", "amp_C", "flash_attn")


@pytest.fixture
def machine(monkeypatch):
    """A machine with an H100 and the packages given: a function that sets them up."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def install(*packages):
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            monkeypatch.delitem(sys.modules, name)
        modules = {**dict.fromkeys(PACKAGES), **{k: v for package in packages for k, v in package.items()}}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    return install


TRITON = {"triton": fakes.module("triton", jit=None, language=None)}


def choose(device=GPU, dtype=torch.bfloat16, head_dim=64, **kernels):
    return choose_names(Config(model=ModelConfig(head_dim=head_dim), kernels=KernelsConfig(**kernels)), device, dtype)


def test_configuration_names_what_there_is():
    hints = get_type_hints(KernelsConfig)
    assert hints.pop("compile") is bool
    assert set(hints) == set(IMPLEMENTATIONS) == set(Kernels._fields)
    for operation, choices in IMPLEMENTATIONS.items():
        assert get_args(hints[operation]) == ("auto", *choices)
    assert all(field.default == "auto" for field in fields(KernelsConfig) if field.name != "compile")


def test_cpu_runs_torch():
    names = choose(CPU, torch.float32)
    assert names == TORCH
    line = "kernels: rms_norm torch, gather_norm torch, scatter_add torch, select torch, " \
           "attention sdpa, adamw torch_fused"
    assert describe(names, compiled=False) == line
    assert describe(names, compiled=True) == f"{line}; blocks compiled"
    assert all(callable(function) for function in load(names))


@pytest.mark.parametrize("operation", IMPLEMENTATIONS)
def test_every_name_stands_for_a_function(operation):
    for name in IMPLEMENTATIONS[operation]:
        if name == "triton":
            pytest.importorskip("triton")
        assert callable(getattr(load({**TORCH, operation: name}), operation))


def test_gpu_runs_what_is_installed(machine):
    machine()
    assert choose() == TORCH
    machine(TRITON)
    ours = {**TORCH, **dict.fromkeys(("rms_norm", "gather_norm", "scatter_add", "select"), "triton")}
    assert choose() == ours
    machine(fakes.NVIDIA_APEX)
    assert choose() == {**TORCH, "rms_norm": "apex"}
    machine(TRITON, fakes.NVIDIA_APEX, fakes.FLASH_ATTN)
    assert choose() == {**ours, "attention": "flash_attn"}
    assert choose(CPU) == TORCH
    chosen = choose(rms_norm="apex", select="torch", attention="sdpa", adamw="apex")
    assert chosen == {**ours, "rms_norm": "apex", "select": "torch", "adamw": "apex"}


def test_what_torch_compile_makes_itself(machine):
    machine(TRITON, fakes.NVIDIA_APEX)
    assert choose(compile=True) == {**TORCH, "select": "triton"}
    for operation, name in (("rms_norm", "triton"), ("rms_norm", "apex"), ("scatter_add", "triton")):
        with pytest.raises(UserError, match=f"kernels.{operation} is {name}, .*: kernels.compile is on"):
            choose(compile=True, **{operation: name})


def test_flash_attn_has_limits(machine, monkeypatch):
    machine(fakes.FLASH_ATTN)
    assert choose(dtype=torch.float16)["attention"] == choose(head_dim=256)["attention"] == "flash_attn"
    assert choose(dtype=torch.float32)["attention"] == choose(head_dim=320)["attention"] == "sdpa"
    with pytest.raises(UserError, match="kernels.attention is flash_attn, .*: it does not work on float32. Set it to "):
        choose(dtype=torch.float32, attention="flash_attn")
    with pytest.raises(UserError, match="head_dim of at most 256, and this model's is 320"):
        choose(head_dim=320, attention="flash_attn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match="compute capability 8.0, this one has 7.5"):
        choose(attention="flash_attn")


def test_apex_of_pypi_is_told_apart(machine):
    machine(fakes.PYPI_APEX)
    assert choose() == TORCH
    for operation in ("rms_norm", "adamw"):
        with pytest.raises(UserError, match=r"No module named 'apex\.\w+'.*NVIDIA's apex.*PyPI's apex is another"):
            choose(**{operation: "apex"})


def test_apex_without_its_extensions(machine):
    machine({name: module for name, module in fakes.NVIDIA_APEX.items() if name.startswith("apex")})
    assert choose()["rms_norm"] == "torch"
    with pytest.raises(UserError, match="fused_layer_norm_cuda can't be imported.*CUDA extensions"):
        choose(rms_norm="apex")
    machine({**fakes.NVIDIA_APEX, "amp_C": fakes.module("amp_C")})
    with pytest.raises(UserError, match="amp_C has no multi_tensor_adam"):
        choose(adamw="apex")


@pytest.mark.parametrize("operation, name", [(operation, name) for operation, choices in IMPLEMENTATIONS.items()
                                             for name in choices if name in ("triton", "apex", "flash_attn")])
def test_what_can_not_be_used_is_refused(machine, operation, name):
    with pytest.raises(UserError, match=f"kernels.{operation} is {name}, .*: it needs a CUDA device, and this run is "
                                        "on the CPU. Set it to auto"):
        choose(CPU, **{operation: name})
    machine()
    with pytest.raises(UserError, match=f"kernels.{operation} is {name}, which can't be used: the module .* can't be "
                                        "imported"):
        choose(**{operation: name})
