"""One AdamW step (Loshchilov & Hutter, arXiv 1711.05101) of a list of parameters, in place.

All take the same lists, an entry per parameter: parameters, gradients, averages of gradients and of their squares, and
steps taken so far (fp32 scalars on the parameters' device); and leave the same state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

AdamW = Callable[..., None]


def torch_fused(parameters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor],
                steps: list[Tensor], **settings: float) -> None:
    """By torch's fused kernel.

    Args:
        settings: lr, beta1, beta2, weight_decay, eps.
    """
    adamw(parameters, gradients, averages, squares, [], steps, fused=True, amsgrad=False, maximize=False, **settings)


def torch_foreach(parameters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor],
                  steps: list[Tensor], **settings: float) -> None:
    """By torch's multi-tensor operations, several passes over the state."""
    if not parameters:
        return
    # "capturable" reads the steps on the GPU; otherwise each would be waited for.
    adamw(parameters, gradients, averages, squares, [], steps, foreach=True, capturable=parameters[0].is_cuda,
          amsgrad=False, maximize=False, **settings)


def apex(parameters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor],
         steps: list[Tensor], *, lr: float, beta1: float, beta2: float, weight_decay: float, eps: float) -> None:
    """By the kernel under NVIDIA apex's FusedAdam. It takes the step as a number, so each call waits for the device."""
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    if not parameters:
        return
    torch._foreach_add_(steps, 1)
    counts = torch.stack(steps).tolist()
    unused = torch.zeros(1, dtype=torch.int32, device=parameters[0].device)
    for count in sorted(set(counts)):
        lists = [[tensor for tensor, its_count in zip(tensors, counts, strict=True) if its_count == count]
                 for tensors in (gradients, parameters, averages, squares)]
        decoupled = bias_correction = 1
        multi_tensor_applier(amp_C.multi_tensor_adam, unused, lists, lr, beta1, beta2, eps, int(count), decoupled,
                             bias_correction, weight_decay)
