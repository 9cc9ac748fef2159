"""Parameters that may be sharded over the tensor-parallel group, and the embedding sharded over the vocabulary.

A parameter carries what others need to know of it:
    kind                 "matrix" [..., out, in] (leading dimensions are a stack of matrices), "embedding" or "other"
    tensor_parallel_dim  the dimension that is sharded, None if every rank holds all of it
    full_shape           its shape on one process
    init_std             standard deviation of its initial values; None for a constant
    init_value           that constant
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_xmod.parallel.collectives import reduce_from_tensor_parallel
from megatron_xmod.parallel.mesh import Mesh


def new_parameter(shape: tuple[int, ...], mesh: Mesh, *, kind: str = "other", tensor_parallel_dim: int | None = None,
                  init_std: float | None = None, init_value: float = 1.0) -> nn.Parameter:
    """An uninitialised parameter: this rank's shard of `shape`. `initialise` fills it."""
    local = list(shape)
    if tensor_parallel_dim is not None:
        assert shape[tensor_parallel_dim] % mesh.tensor_size == 0
        local[tensor_parallel_dim] //= mesh.tensor_size
    parameter = nn.Parameter(torch.empty(local))
    parameter.kind = kind
    parameter.tensor_parallel_dim = tensor_parallel_dim
    parameter.full_shape = tuple(shape)
    parameter.init_std = init_std
    parameter.init_value = init_value
    if tensor_parallel_dim is not None and mesh.tensor_size > 1:
        # DeepSpeed's gradient norm counts a parameter on the first tensor rank only, unless it bears this mark.
        parameter.tensor_model_parallel = True
    return parameter


@torch.no_grad()
def initialise(module: nn.Module, name: str, seed: int, mesh: Mesh) -> None:
    """Fills the parameters of a module. Values depend on (seed, name, parameter) alone, not on the parallel layout."""
    for parameter_name, parameter in module.named_parameters():
        if parameter.init_std is None:
            parameter.fill_(parameter.init_value)
            continue
        digest = hashlib.sha256(f"{seed}/{name}.{parameter_name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "little"))
        full = torch.empty(parameter.full_shape, dtype=torch.float32, device=parameter.device)
        full.normal_(0.0, parameter.init_std, generator=generator)
        parameter.copy_(shard(full, parameter.tensor_parallel_dim, mesh))


def shard(full: Tensor, dim: int | None, mesh: Mesh) -> Tensor:
    """This rank's part of a tensor."""
    return full if dim is None else full.chunk(mesh.tensor_size, dim)[mesh.tensor_rank]


class VocabEmbedding(nn.Module):
    """Token embedding, sharded over the vocabulary.

    Args:
        vocab_size: Padded number of tokens V.
        hidden_size: Width D.
    """

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, init_std: float):
        super().__init__()
        self.mesh = mesh
        self.weight = new_parameter((vocab_size, hidden_size), mesh, kind="embedding", tensor_parallel_dim=0,
                                    init_std=init_std)

    def forward(self, tokens_BS: Tensor, cache=None) -> Tensor:
        """[B, S] token ids -> [B, S, D]."""
        if self.mesh.tensor_group is None:
            return F.embedding(tokens_BS, self.weight)
        rows = self.weight.shape[0]
        local = tokens_BS - self.mesh.tensor_rank * rows
        mine = (local >= 0) & (local < rows)
        x_BSD = F.embedding(local.where(mine, 0), self.weight).masked_fill(~mine.unsqueeze(-1), 0.0)
        return reduce_from_tensor_parallel(x_BSD, self.mesh.tensor_group)


def output_init_std(init_std: float, active_layers: float) -> float:
    """Of projections that write into the residual stream: the stream's variance grows with the depth a token passes."""
    return init_std / math.sqrt(2 * active_layers)
