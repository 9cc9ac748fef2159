"""Sharded embedding and the pair of collectives around sharded work, against the whole; the mesh's numbering."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_xmod.errors import UserError
from megatron_xmod.parallel import mesh as mesh_module
from megatron_xmod.parallel.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megatron_xmod.parallel.mesh import Mesh, check_world
from megatron_xmod.parallel.tensor import VocabEmbedding, new_parameter, output_init_std, shard
from tests.unit.parallel.threads import run_ranks


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_embedding(monkeypatch, size):
    table = random(16, 3)
    tokens = torch.tensor([[0, 3, 4, 15], [7, 8, 8, 11]])  # the ends of every shard
    pull = random(2, 4, 3, seed=1)
    whole = table.clone().requires_grad_()
    (F.embedding(tokens, whole) * pull).sum().backward()

    def work(mesh):
        embedding = VocabEmbedding(16, 3, mesh, 0.02).double()
        assert embedding.weight.shape == (16 // size, 3)
        with torch.no_grad():
            embedding.weight.copy_(table.chunk(size)[mesh.tensor_rank])
        out = embedding(tokens)
        (out * pull).sum().backward()
        return out.detach(), embedding.weight.grad

    results = run_ranks(monkeypatch, size, work)
    for out, _ in results:
        assert torch.equal(out, table[tokens])
    assert torch.equal(torch.cat([g for _, g in results]), whole.grad)


def test_column_then_row_parallel_layer(monkeypatch):
    x, up, down, pull = random(5, 6), random(8, 6, seed=1), random(6, 8, seed=2), random(5, 6, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, up, down)]
    expected = torch.tanh(leaves[0] @ leaves[1].T) @ leaves[2].T
    (expected * pull).sum().backward()

    def work(mesh):
        mine = [t.clone().requires_grad_() for t in (x, up.chunk(2)[mesh.rank], down.chunk(2, 1)[mesh.rank])]
        hidden = torch.tanh(copy_to_tensor_parallel(mine[0], mesh.tensor_group) @ mine[1].T)
        out = reduce_from_tensor_parallel(hidden @ mine[2].T, mesh.tensor_group)
        (out * pull).sum().backward()
        return out.detach(), *(t.grad for t in mine)

    results = run_ranks(monkeypatch, 2, work)
    for out, x_grad, _, _ in results:
        assert torch.allclose(out, expected, rtol=0, atol=1e-13)
        assert torch.allclose(x_grad, leaves[0].grad, rtol=0, atol=1e-13)
    assert torch.allclose(torch.cat([r[2] for r in results]), leaves[1].grad, rtol=0, atol=1e-13)
    assert torch.allclose(torch.cat([r[3] for r in results], 1), leaves[2].grad, rtol=0, atol=1e-13)


def test_without_a_group_nothing_is_communicated(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", None)
    x = random(3)
    assert copy_to_tensor_parallel(x, None) is x
    assert reduce_from_tensor_parallel(x, None) is x


def test_parameter_says_what_it_is():
    mesh = Mesh(tensor_size=2, rank=1)
    split = new_parameter((3, 8, 6), mesh, kind="matrix", tensor_parallel_dim=1, init_std=0.5)
    assert (split.shape, split.full_shape, split.kind) == ((3, 4, 6), (3, 8, 6), "matrix")
    assert split.tensor_model_parallel
    copied = new_parameter((3,), mesh)
    assert (copied.shape, copied.init_std, copied.init_value, copied.kind) == ((3,), None, 1.0, "other")
    # DeepSpeed would count a copy once per rank, and on one process needs no mark.
    assert not hasattr(copied, "tensor_model_parallel")
    assert not hasattr(new_parameter((8,), Mesh(), tensor_parallel_dim=0), "tensor_model_parallel")


def test_shard():
    full = torch.arange(24).view(4, 6)
    assert torch.equal(shard(full, 1, Mesh(tensor_size=3, rank=4)), full[:, 2:4])
    assert shard(full, None, Mesh(tensor_size=3, rank=1)) is full


def test_output_deviation():
    assert output_init_std(0.02, 8) == pytest.approx(0.02 / math.sqrt(16))


@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(2, 2, 2), (1, 3, 2), (4, 1, 2), (2, 3, 1)])
def test_groups_are_those_of_the_coordinates(monkeypatch, tensor, pipeline, data):
    """Ranks count tensor first, then data, then pipeline; a group is the ranks that differ in one coordinate."""
    world = tensor * pipeline * data
    places = {(p * data + d) * tensor + t: (t, d, p) for p in range(pipeline) for d in range(data)
              for t in range(tensor)}
    created = []
    monkeypatch.setattr(mesh_module.dist, "get_world_size", lambda: world)
    monkeypatch.setattr(mesh_module.dist, "new_group", lambda ranks: created.append(ranks) or tuple(ranks))
    orders = []
    for rank in range(world):
        created.clear()
        monkeypatch.setattr(mesh_module.dist, "get_rank", lambda rank=rank: rank)
        mesh = mesh_module.build_mesh(tensor, pipeline)
        orders.append([list(ranks) for ranks in created])
        assert (mesh.tensor_rank, mesh.data_rank, mesh.pipeline_rank) == places[rank]
        for axis, group, size in ((0, mesh.tensor_group, tensor), (2, mesh.pipeline_group, pipeline)):
            peers = tuple(r for r, place in places.items()
                          if all(place[i] == places[rank][i] for i in range(3) if i != axis))
            assert group == (peers if size > 1 else None)
    assert all(order == orders[0] for order in orders), "ranks create groups in different orders: a deadlock"


def test_processes_that_can_not_be_shared():
    assert check_world(8, 2, 2) == 2
    with pytest.raises(UserError, match=r"6 processes.*multiple of 4"):
        check_world(6, 2, 2)
    with pytest.raises(UserError):
        check_world(2, 2, 2)
