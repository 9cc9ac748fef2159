"""The Triton kernels, and the torch references, against formulas in float64 under autograd."""

import pytest
import torch

from megatron_xmod.kernels import reference

triton_norm = pytest.importorskip("megatron_xmod.kernels.triton_norm", reason="triton is not installed")
triton_gated = pytest.importorskip("megatron_xmod.kernels.triton_gated", reason="triton is not installed")

EPS = 1e-3  # large, so that leaving it out shows
# Relative; bf16 results are computed in fp32 and rounded once, by half a unit in the last place at most. Where a GPU
# rounds, the interpreter cuts off.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7}
DTYPES = list(TOLERANCE)
# Rows, selected rows, width, layers (None: a weight for all). A tile holds 2048 // (width up to a power of two) rows.
SHAPES = [(40, 24, 24, 2), (300, 300, 5, 1), (9, 5, 2100, None), (64, 48, 33, 16), (12, 0, 16, 2), (520, 518, 7, 2)]


def random(*shape, dtype=torch.float64, device="cpu", seed=0):
    """Numbers that the type can hold, in that type."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def make_index(rows, count, device):
    return torch.randperm(rows, generator=torch.Generator().manual_seed(1))[:count].to(device)


def expected_norm(x, weight):
    """The formula; x [M, D] stacked by layer if the weight is [R, D]."""
    scaled = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return (scaled.view(*weight.shape[:-1], -1, weight.shape[-1]) * weight.unsqueeze(-2)).view_as(x)


def expected_add(x, index, delta, gate):
    place_NM = (torch.arange(len(x), device=x.device).unsqueeze(1) == index).to(x.dtype)
    return x + place_NM @ (delta if gate is None else gate.unsqueeze(1) * delta)


def run(function, inputs):
    """Outputs and the gradients of a weighted sum of them, for the inputs that are floating-point tensors."""
    leaves = [x.clone().requires_grad_() for x in inputs if x is not None and x.is_floating_point()]
    left = iter(leaves)
    outputs = function(*(next(left) if x is not None and x.is_floating_point() else x for x in inputs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [random(*y.shape, dtype=torch.bfloat16, device=y.device, seed=10 + i).to(y.dtype)
             for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, seeds)
    return outputs, [leaf.grad for leaf in leaves]


def assert_equal(function, expected, inputs):
    found = run(function, inputs)
    exact = run(expected, [x.double() if x is not None and x.is_floating_point() else x for x in inputs])
    for ours, theirs in zip((*found[0], *found[1]), (*exact[0], *exact[1]), strict=True):
        assert ours.shape == theirs.shape
        # Sums of gradients cancel: their error is relative to what was added up, so to the largest.
        tolerance = TOLERANCE[ours.dtype]
        size = theirs.abs().max().item() if theirs.numel() else 0.0
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * size / 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, count, width, layers", SHAPES)
def test_gather_norm(device, monkeypatch, rows, count, width, layers, dtype):
    monkeypatch.setattr(triton_norm, "_PROGRAMS", 2 * (layers or 1))  # so that a program has several tiles
    weight = random(*([layers] if layers else []), width, dtype=dtype, device=device, seed=2) + 2
    inputs = [random(rows, width, dtype=dtype, device=device), make_index(rows, count, device), weight]
    assert_equal(lambda x, index, w: triton_norm.gather_norm(x, index, w, EPS),
                 lambda x, index, w: (x[index], expected_norm(x[index], w)), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, layers", [((2, 3, 5, 4, 24), 2), ((7, 3, 33), None), ((1, 600, 8), 1), ((2, 0, 8), 2)])
def test_rms_norm(device, shape, layers, dtype):
    weight = random(*([layers] if layers else []), shape[-1], dtype=dtype, device=device, seed=2) + 2
    assert_equal(lambda x, w: triton_norm.rms_norm(x, w, EPS),
                 lambda x, w: expected_norm(x.flatten(0, -2), w).view(x.shape),
                 [random(*shape, dtype=dtype, device=device), weight])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows, count, width, layers", SHAPES)
def test_add_gated(device, rows, count, width, layers, gated, dtype):
    gate = random(count, dtype=torch.promote_types(dtype, torch.float32), device=device, seed=3) if gated else None
    inputs = [random(rows, width, dtype=dtype, device=device), make_index(rows, count, device),
              random(count, width, dtype=dtype, device=device, seed=4), gate]
    assert_equal(triton_gated.add_gated, expected_add, inputs)


def test_rows_that_are_not_selected(device):
    """They keep their bits, -0.0 and NaN included, and their gradient through the norm is exactly 0."""
    x, index = random(6, 5, dtype=torch.float32, device=device), torch.tensor([1, 4], device=device)
    x[0, 0], x[2, 3] = -0.0, float("nan")
    y = triton_gated.add_gated(x, index, torch.ones(2, 5, device=device), torch.ones(2, device=device))
    others = [0, 2, 3, 5]
    assert torch.equal(y[others].view(torch.int32), x[others].view(torch.int32))
    x.requires_grad_()
    triton_norm.gather_norm(x, index, torch.ones(5, device=device), EPS)[1].sum().backward()
    assert not x.grad[others].any() and x.grad[[1, 4]].all()


def test_views_are_refused_where_a_copy_would_be_large(device):
    x, index = random(8, 6, device=device).T, torch.tensor([0], device=device)
    with pytest.raises(AssertionError):
        triton_norm.gather_norm(x, index, random(8, device=device), EPS)
    with pytest.raises(AssertionError):
        triton_gated.add_gated(x, index, random(1, 8, device=device), random(1, device=device))


@pytest.mark.parametrize("layers", [None, 2])
def test_torch_references(layers):
    weight = random(*([layers] if layers else []), 6, seed=2)
    x, index, delta, gate = random(9, 6), make_index(9, 4, "cpu"), random(4, 6, seed=3), random(4, seed=4)
    assert_equal(lambda x, w: reference.gather_norm(x, index, w, EPS),
                 lambda x, w: (x[index], expected_norm(x[index], w)), [x, weight])
    assert_equal(reference.add_gated, expected_add, [x, index, delta, gate])
    assert_equal(lambda x, w: reference.rms_norm(x.view(2, 2, 2, 6), w, EPS),
                 lambda x, w: expected_norm(x, w).view(2, 2, 2, 6), [random(8, 6), weight])
