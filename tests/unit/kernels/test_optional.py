"""Optional packages against torch: by stand-ins everywhere, and where they are installed on a GPU, by themselves."""

import sys

import fakes
import pytest
import torch

from megatron_xmod.config.schema import Config, KernelsConfig
from megatron_xmod.errors import UserError
from megatron_xmod.kernels import adamw, apex_norm, attention, reference
from megatron_xmod.kernels.registry import choose_names

SETTINGS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}


@pytest.fixture
def installed(monkeypatch):
    for name, module in {**fakes.NVIDIA_APEX, **fakes.FLASH_ATTN}.items():
        monkeypatch.setitem(sys.modules, name, module)


def needs(operation, name):
    """Skips where the implementation can't be used, and says why."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    try:
        choose_names(Config(kernels=KernelsConfig(**{operation: name})), torch.device("cuda"), torch.bfloat16)
    except UserError as error:
        pytest.skip(str(error))


def random(*shape, seed=0, device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def qkv(*lead, device="cpu", dtype=torch.float64):
    return [random(*lead, heads, 8, seed=seed, device=device, dtype=dtype) for seed, heads in enumerate((4, 2, 2))]


@pytest.mark.parametrize("lead", [(2, 5), (3, 2, 6), (1, 1)])
def test_attention(installed, lead):
    q, k, v = qkv(*lead)
    found = attention.flash_attn(q, k, v)
    torch.testing.assert_close(attention.sdpa(q, k, v), found, rtol=1e-13, atol=1e-13)
    assert found.shape == q.shape


@pytest.mark.cuda
def test_flash_attn_itself():
    needs("attention", "flash_attn")
    inputs = qkv(3, 2, 70, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (attention.flash_attn, attention.sdpa):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        y.square().sum().backward()
        results.append([y, *(x.grad for x in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("weight", [random(8), random(2, 8)])
def test_apex_norm(installed, weight):
    x = random(2, 3, 5, 8, seed=1)
    torch.testing.assert_close(apex_norm.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3), rtol=1e-13,
                               atol=1e-13)


@pytest.mark.cuda
@pytest.mark.parametrize("weight", [random(8), random(2, 8)])
def test_apex_norm_itself(weight):
    needs("rms_norm", "apex")
    results = []
    for function in (apex_norm.rms_norm, reference.rms_norm):
        x = random(2, 3, 5, 8, seed=1, device="cuda", dtype=torch.float32).requires_grad_()
        w = weight.to("cuda", torch.float32).requires_grad_()
        y = function(x, w, 1e-3)
        y.square().sum().backward()
        results.append((y, x.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def train(step, device="cpu", dtype=torch.float64):
    """Parameters and state after three steps; the last parameter has one step behind it when it first joins in."""
    parameters = [random(*shape, seed=i, device=device, dtype=dtype) for i, shape in enumerate([(4, 3), (), (7,)])]
    averages, squares = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    steps = [torch.zeros((), device=device) for _ in parameters]
    steps[2] += 1
    for i in range(3):
        gradients = [random(*p.shape, seed=10 * i + j, device=device, dtype=dtype) for j, p in enumerate(parameters)]
        step(parameters, gradients, averages, squares, steps, **SETTINGS)
    step([], [], [], [], [], **SETTINGS)
    return parameters, averages, squares, steps


def by_hand(parameters, gradients, averages, squares, steps, *, lr, beta1, beta2, weight_decay, eps):
    for p, g, m, v, t in zip(parameters, gradients, averages, squares, steps, strict=True):
        t += 1
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g**2)
        p.copy_(p - lr * weight_decay * p - lr * m / (1 - beta1**t.item()) / ((v / (1 - beta2**t.item())).sqrt() + eps))


@pytest.mark.parametrize("step", [adamw.torch_fused, adamw.torch_foreach, adamw.apex])
def test_adamw(installed, step):
    for ours, theirs in zip(train(step), train(by_hand), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["torch_fused", "torch_foreach", "apex"])
def test_adamw_itself(name):
    needs("adamw", name)
    expected = train(by_hand, dtype=torch.float64)
    for ours, theirs in zip(train(getattr(adamw, name), "cuda", torch.float32), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.cpu().double(), b.double(), rtol=1e-5, atol=1e-6)
