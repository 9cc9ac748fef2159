"""kernels.compile: blocks and updates of sparse layers are one graph each, and the graph is the same function."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace

import pytest
import torch

from megatron_xmod.model import context as context_module
from megatron_xmod.model.sparse import AnchorGroup
from tests.unit.model.toy import TOY, distance, make_context, make_hidden, scramble

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")


def run_group(mode: str, compile: bool, dtype: torch.dtype):
    """Of one round of 4 layers and its anchor: the output without gradients; and the output and all gradients, the
    input's first, with recomputation."""
    context = make_context(replace(TOY, routing=replace(TOY.routing, mode=mode)))
    context.compile, context.recompute = compile, True
    group = scramble(AnchorGroup(context, (4,), "group")).to(dtype)
    x_BSD = make_hidden(context, 2, 16, dtype).requires_grad_()
    with torch.no_grad():
        evaluated = group(x_BSD)
    out = group(x_BSD)
    (out * make_hidden(context, 2, 16, dtype, seed=1)).sum().backward()
    return [evaluated, out.detach(), x_BSD.grad, *(p.grad for p in group.parameters())]


@pytest.mark.parametrize(("backend", "mode", "dtype", "tolerance"), [
    ("aot_eager", "soft", torch.float64, 1e-12),
    ("aot_eager", "exclusive", torch.float64, 1e-12),
    pytest.param("inductor", "exclusive", torch.float32, 1e-5, marks=compiler),
])
def test_compiled_is_eager(monkeypatch, backend, mode, dtype, tolerance):
    compiled = []

    def counting(function, **options):
        assert options["fullgraph"] and not options["dynamic"]  # fails on a graph break
        compiled.append(function.__name__)
        return torch_compile(function, backend=backend, **options)

    torch_compile = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", counting)
    monkeypatch.setattr(context_module, "_compiled", functools.cache(context_module._compiled.__wrapped__))
    ours, eager = run_group(mode, True, dtype), run_group(mode, False, dtype)
    assert sorted(compiled) == ["_dense_block", "_sparse_update"]
    for a, b in zip(ours, eager, strict=True):
        assert distance(a, b) <= tolerance


def test_varying_shapes_are_not_compiled(monkeypatch):
    """Under the causal rule a layer takes as many tokens as pass; each count would be compiled anew."""
    monkeypatch.setattr(context_module, "_compiled", lambda function: pytest.fail("compiled"))
    context = make_context(mode="threshold")
    context.compile = True
    scramble(AnchorGroup(context, (4,), "group")).double()(make_hidden(context, 1, 16))


def test_a_cache_is_not_compiled(monkeypatch):
    monkeypatch.setattr(context_module, "_compiled", lambda function: pytest.fail("compiled"))
    context = make_context()
    context.compile = True
    assert context.maybe_compiled(print, cache=object()) is print
