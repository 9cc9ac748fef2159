"""Cross-entropy over a padded and sharded vocabulary against torch's on the true one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_xmod.parallel import loss as loss_module
from megatron_xmod.parallel.loss import cross_entropy
from megatron_xmod.parallel.mesh import Mesh
from tests.unit.parallel.threads import run_ranks

PADDED = 32


def make(vocab_size, dtype=torch.float64, scale=3.0):
    """Logits [2, 5, 32], whose padding is larger than anything else, and targets that meet both ends."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(2, 5, PADDED, dtype=torch.float64, generator=generator)
    logits[..., vocab_size:] = 100.0
    targets = torch.randint(0, vocab_size, (2, 5), generator=generator)
    targets[0, 0], targets[1, 4] = 0, vocab_size - 1
    weights_BS = torch.rand(2, 5, dtype=torch.float64, generator=generator)
    return logits.to(dtype), targets, weights_BS


def expected_loss(logits, targets, vocab_size, weights_BS):
    """Loss and gradient of the logits, from torch alone."""
    leaf = logits.detach().clone().requires_grad_()
    dtype = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(leaf[..., :vocab_size].reshape(-1, vocab_size).to(dtype), targets.flatten(),
                           reduction="none").view(targets.shape)
    (loss * weights_BS).sum().backward()
    return loss.detach(), leaf.grad


@pytest.fixture(params=[None, 700, 1], ids=["whole", "two pieces", "row by row"])
def pieces(request, monkeypatch):
    """Toy logits are one piece; with fewer bytes for a piece they are several, the last one smaller."""
    if request.param:
        monkeypatch.setitem(loss_module._PIECE_BYTES, "cpu", request.param)


@pytest.mark.parametrize("vocab_size", [PADDED, 29, 7])
def test_one_rank(vocab_size, pieces):
    logits, targets, weights_BS = make(vocab_size)
    loss, gradient = expected_loss(logits, targets, vocab_size, weights_BS)
    logits.requires_grad_()
    ours = cross_entropy(logits, targets, vocab_size, Mesh())
    (ours * weights_BS).sum().backward()
    assert torch.allclose(ours, loss, rtol=0, atol=1e-13)
    assert torch.allclose(logits.grad, gradient, rtol=0, atol=1e-14)
    assert not logits.grad[..., vocab_size:].any()
    # Written out: minus the log of the target's share.
    by_hand = -(logits[0, 0, :vocab_size].exp() / logits[0, 0, :vocab_size].exp().sum()).log()[targets[0, 0]]
    assert ours[0, 0].item() == pytest.approx(by_hand.item(), abs=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab_size", [PADDED, 29, 7])  # with 7 some ranks hold nothing but padding
def test_sharded(monkeypatch, size, vocab_size, pieces):
    logits, targets, weights_BS = make(vocab_size)
    loss, gradient = expected_loss(logits, targets, vocab_size, weights_BS)

    def work(mesh):
        leaf = logits.chunk(size, -1)[mesh.tensor_rank].clone().requires_grad_()
        ours = cross_entropy(leaf, targets, vocab_size, mesh)
        (ours * weights_BS).sum().backward()
        assert torch.equal(leaf, logits.chunk(size, -1)[mesh.tensor_rank]), "the logits were overwritten"
        return ours.detach(), leaf.grad

    results = run_ranks(monkeypatch, size, work)
    for ours, _ in results:
        assert torch.equal(ours, results[0][0])
        assert torch.allclose(ours, loss, rtol=0, atol=1e-13)
    assert torch.allclose(torch.cat([g for _, g in results], -1), gradient, rtol=0, atol=1e-14)


def test_sharded_loss_is_stable(monkeypatch):
    """Logits whose exponentials overflow, and a shard that is far below the other."""
    logits = torch.full((1, 2, 4), -1e4)
    logits[0, :, 0] = torch.tensor([1e4, 5e3])
    targets = torch.tensor([[0, 3]])
    results = run_ranks(monkeypatch, 2, lambda mesh: cross_entropy(logits.chunk(2, -1)[mesh.tensor_rank], targets, 4,
                                                                   mesh))
    for loss in results:
        assert loss.tolist() == [[0.0, 15000.0]]


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_logits_give_a_loss_in_fp32(monkeypatch, size):
    logits, targets, weights_BS = make(29, torch.bfloat16)
    loss, gradient = expected_loss(logits, targets, 29, weights_BS)

    def work(mesh):
        mesh = mesh if size > 1 else Mesh()
        leaf = logits.chunk(size, -1)[mesh.tensor_rank].clone().requires_grad_()
        ours = cross_entropy(leaf, targets, 29, mesh)
        (ours * weights_BS).sum().backward()
        return ours.detach(), leaf.grad

    results = run_ranks(monkeypatch, size, work)
    for ours, part in results:
        assert (ours.dtype, part.dtype) == (torch.float32, torch.bfloat16)
        assert torch.allclose(ours, loss, rtol=1e-6, atol=1e-6)
    assert torch.allclose(torch.cat([g for _, g in results], -1).float(), gradient.float(), rtol=1e-2, atol=1e-5)
