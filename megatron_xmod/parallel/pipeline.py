"""The model as DeepSpeed's PipelineModule: stages are cut between anchor groups, balanced by FLOPs."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron_xmod.model.build import build_layer, layer_count
from megatron_xmod.model.context import ModelContext
from megatron_xmod.parallel.loss import cross_entropy
from megatron_xmod.runtime.distributed import quiet_stdout


class _Layer(LayerSpec):
    """A place in the list of layers, built only on the stage that owns it."""

    def __init__(self, context: ModelContext, index: int, seed: int, dtype: torch.dtype):
        super().__init__(nn.Module)
        self.arguments, self.dtype = (context, index, seed), dtype

    def build(self, log: bool = False) -> nn.Module:
        # Values are drawn on the CPU, so that they are the same everywhere; only one layer at a time stays there.
        return build_layer(*self.arguments).to(get_accelerator().current_device_name(), self.dtype)


class Pipeline(PipelineModule):
    """The stage of this process.

    Args:
        bounds: Stage i owns layers bounds[i] to bounds[i + 1] of the list.
        seed: Of the initial weights.
        dtype: Of the parameters.
    """

    def __init__(self, context: ModelContext, bounds: list[int], seed: int, dtype: torch.dtype):
        self.parts = bounds
        mesh = context.mesh
        topology = PipeModelDataParallelTopology(num_pp=mesh.pipeline_size, num_mp=mesh.tensor_size,
                                                 num_dp=mesh.data_size)

        def mean_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
            return cross_entropy(logits_BSV, targets_BS, context.config.vocab_size, mesh).mean()

        with quiet_stdout():
            super().__init__([_Layer(context, i, seed, dtype) for i in range(layer_count(context))],
                             topology=topology, loss_fn=mean_loss)
        self.context = context

    def _partition_layers(self, method: str) -> None:
        """Called by DeepSpeed's constructor; its own methods price a layer by its parameters."""
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])
