"""RMSNorm by the kernel under NVIDIA apex's FusedRMSNorm."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension; weight [D], or [R, D] for x [R, ..., D]."""
    from apex.normalization.fused_layer_norm import fused_rms_norm, fused_rms_norm_affine

    if weight.dim() == 1:
        return fused_rms_norm_affine(x, weight, weight.shape, eps)
    # The kernel knows one weight only.
    stacked = weight.view(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[1])
    return fused_rms_norm(x, weight.shape[1:], eps) * stacked
