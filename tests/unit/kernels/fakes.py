"""Stand-ins for optional packages, with the interfaces that their sources have. They compute by plain formulas."""

from types import ModuleType

import torch


def module(name, **contents):
    made = ModuleType(name)
    made.__path__ = []  # a package: names below it are looked for, and not found
    vars(made).update(contents)
    return made


def rms(x, shape, eps):
    assert tuple(shape) == x.shape[-1:]
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def multi_tensor_adam(chunk_size, overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay):
    """csrc/multi_tensor_adam.cu of NVIDIA's apex, mode 1: decoupled weight decay."""
    assert overflow.dtype == torch.int32 and isinstance(step, int) and mode == bias_correction == 1
    for gradient, parameter, average, square in zip(*lists, strict=True):
        average.mul_(beta1).add_((1 - beta1) * gradient)
        square.mul_(beta2).add_((1 - beta2) * gradient.square())
        update = average / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
        parameter.sub_(lr * (update + weight_decay * parameter))


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """[B, S, H, E] with keys and values [B, S, G, E]."""
    assert causal and q.dim() == k.dim() == v.dim() == 4
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    scores = torch.einsum("bshe,bthe->bhst", q, k) / q.shape[-1]**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhst,bthe->bshe", scores.masked_fill(future, float("-inf")).softmax(-1), v)


NVIDIA_APEX = {
    "apex": module("apex"),
    "apex.normalization": module("apex.normalization"),
    "apex.normalization.fused_layer_norm": module(
        "apex.normalization.fused_layer_norm", fused_rms_norm=rms,
        fused_rms_norm_affine=lambda x, weight, shape, eps: rms(x, shape, eps) * weight),
    "fused_layer_norm_cuda": module("fused_layer_norm_cuda", rms_forward_affine=None),
    "apex.multi_tensor_apply": module(
        "apex.multi_tensor_apply", multi_tensor_applier=lambda op, overflow, lists, *settings: op(
            2048 * 32, overflow, lists, *settings)),
    "amp_C": module("amp_C", multi_tensor_adam=multi_tensor_adam),
}
# The package of that name on PyPI: a toolkit for web applications.
PYPI_APEX = {"apex": module("apex", RoutesApp=None)}
FLASH_ATTN = {"flash_attn": module("flash_attn", flash_attn_func=flash_attn_func)}
