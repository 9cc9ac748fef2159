"""AdamW and Muon in one optimizer, and the gradient norm of a model spread over tensor and pipeline ranks.

Every parameter says what it is (see `parallel/tensor.py`): `kind` decides how it is moved, and `tensor_parallel_dim`
whether a tensor-parallel rank holds a share of it or a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_xmod.config.schema import OptimizerConfig
from megatron_xmod.kernels.adamw import AdamW, torch_fused
from megatron_xmod.parallel.mesh import Mesh

# Quintic iteration with the steepest slope at zero: five steps bring all singular values near 1 (about 0.7 to 1.2),
# which is enough for an update and cheaper than exact convergence.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7  # a matrix whose gradients were all zero stays zero


def build_optimizer(named_parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig, mesh: Mesh, *,
                    zero_stage: int, adamw: AdamW = torch_fused) -> GroupedOptimizer:
    """The optimizer over this process's parameters; frozen ones are left out.

    Under ZeRO stage 0 it measures the gradient norm and clips. With ZeRO the engine does both, and calls `step` on
    flat fp32 pieces that replace the parameters of each group.
    """
    kinds: dict[str, list[Parameter]] = {"matrix": [], "embedding": [], "other": []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            assert getattr(parameter, "kind", None) in kinds, f"parameter {name} has no kind"
            kinds[parameter.kind].append(parameter)
    # A pipeline stage may lack a kind, and DeepSpeed drops empty groups, after which a scheduler's would not match.
    groups = [group for group in _parameter_groups(kinds, config) if group["params"]]
    if zero_stage > 0:
        return GroupedOptimizer(groups, mesh, adamw)
    return GroupedOptimizer(groups, mesh, adamw, max_norm=config.gradient_clipping, measure_norm=True)


def _parameter_groups(kinds: dict[str, list[Parameter]], config: OptimizerConfig) -> list[dict]:
    # "fused" is read by torch's load_state_dict, which then keeps "step" on the parameter's device.
    adam = {"algorithm": "adamw", "lr": config.lr, "betas": tuple(config.betas), "eps": config.eps, "fused": True}
    decayed, groups = kinds["matrix"] + kinds["embedding"], []
    if config.name == "muon":
        decayed = kinds["embedding"]
        groups = [{"params": kinds["matrix"], "algorithm": "muon", "lr": config.muon_lr, "momentum": config.momentum,
                   "newton_schulz_steps": config.newton_schulz_steps, "rms_match": config.rms_match,
                   "weight_decay": config.weight_decay}]
    return [*groups, {"params": decayed, **adam, "weight_decay": config.weight_decay},
            {"params": kinds["other"], **adam, "weight_decay": 0.0}]


class GroupedOptimizer(torch.optim.Optimizer):
    """Moves each group by its own algorithm, "adamw" or "muon". State has the parameter's dtype: fp32 (fp64 in tests).

    Attributes:
        grad_norm: Global gradient norm of the last step, before clipping; None where the engine measures it.
        overflow: Whether the last step was left out because that norm was not finite. Parameters and state are then as
            before, on every rank. DeepSpeed reads this name, counts a skipped step and holds the schedule, as it does
            under ZeRO.
    """

    def __init__(self, groups: list[dict], mesh: Mesh, adamw: AdamW, *, max_norm: float = 0.0,
                 measure_norm: bool = False):
        """
        Args:
            groups: Parameter groups, each with its "algorithm" and that algorithm's settings.
            mesh: The process groups.
            adamw: The implementation of AdamW, one of `kernels/adamw.py`. The state is the same for all.
            max_norm: Largest global gradient norm; 0 for no clipping.
            measure_norm: Whether the norm is measured even without clipping.
        """
        for group in groups:
            if group["algorithm"] == "muon":
                assert mesh.tensor_size == 1, "Muon works on whole matrices, not on tensor-parallel shards"
                assert all(p.ndim >= 2 and p.dtype in (torch.float32, torch.float64) for p in group["params"])
        super().__init__(groups, defaults={})
        self.mesh = mesh
        self.adamw = adamw
        self.max_norm = max_norm
        self.measure_norm = measure_norm or max_norm > 0
        self.grad_norm: float | None = None
        self.overflow = False

    @property
    def _global_grad_norm(self) -> float | None:
        """The name under which DeepSpeed's engine looks for the norm, for its `get_global_grad_norm`."""
        return self.grad_norm

    @torch.no_grad()
    def step(self) -> None:
        if self.measure_norm:
            self._measure_and_clip()
        if self.overflow:
            return
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["algorithm"] == "muon":
                self._muon_step(group, parameters)
            else:
                self._adamw_step(group, parameters)

    def _measure_and_clip(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.grad_norm = global_grad_norm(parameters, self.mesh).item()
        self.overflow = not math.isfinite(self.grad_norm)
        if 0 < self.max_norm < self.grad_norm < math.inf:
            share = self.max_norm / (self.grad_norm + 1e-6)  # as torch and DeepSpeed clip, so that ZeRO stages agree
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], share)

    def _adamw_step(self, group: dict, parameters: list[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        self.adamw(parameters, [p.grad for p in parameters], [s["exp_avg"] for s in states],
                   [s["exp_avg_sq"] for s in states], [s["step"] for s in states], beta1=beta1, beta2=beta2,
                   lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"])

    def _muon_step(self, group: dict, parameters: list[Tensor]) -> None:
        momentum, lr = group["momentum"], group["lr"]
        for p in parameters:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            average = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
            direction = p.grad.lerp(average, momentum)  # Nesterov
            # bf16 is what the GPU multiplies fast, and the iteration forgives it; CPUs may emulate it a hundred times
            # slower than fp32, and fp64 runs are there to be exact.
            if p.is_cuda and p.dtype == torch.float32:
                direction = direction.bfloat16()
            update = orthogonalise(direction, group["newton_schulz_steps"])
            scale = group["rms_match"] * math.sqrt(max(p.shape[-2:]))
            p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Brings the singular values of each matrix near 1 and keeps its singular vectors, by Newton-Schulz iteration.

    Args:
        matrices: [..., out, in]; leading dimensions are a stack of independent matrices, done as one batch.
        steps: Iterations.
    """
    a, b, c = _NEWTON_SCHULZ
    x = matrices.reshape(-1, *matrices.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the Gram matrix is then the smaller one
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)  # Frobenius: all singular values are at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


def global_grad_norm(parameters: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """2-norm of all gradients of the model, each parameter counted once; the same fp64 scalar on every rank.

    Call it on every rank of the tensor and pipeline groups, once gradients are reduced over data-parallel ranks.

    Args:
        parameters: This rank's; those without gradient are left out. `tensor_parallel_dim` says whether it is a shard
            (each rank adds its own) or a copy (tensor rank 0 adds it for all).
        mesh: The process groups.
    """
    gradients = [p.grad for p in parameters if p.grad is not None
                 and (mesh.tensor_rank == 0 or p.tensor_parallel_dim is not None)]
    if gradients:
        # Summed in fp64: fp32 sums of squares are wrong in the fourth digit at 20 million elements.
        squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
    else:
        squares = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for group in (mesh.tensor_group, mesh.pipeline_group):
        if group is not None:
            dist.all_reduce(squares, group=group)
    return squares.sqrt()
