"""The paper's dense backbones, for questions that give a size and no configuration."""

from __future__ import annotations

from math import log

from megatron_xmod.config.schema import ModelConfig

# The paper's label of N_act -> hidden size, head size, SwiGLU width. 28 active layers, 16 query, 8 key/value heads.
_SHAPES = {165e6: (512, 64, 1536), 298e6: (768, 64, 2304), 556e6: (1024, 128, 3072), 936e6: (1536, 128, 3840),
           1.65e9: (2048, 128, 6144)}


def nearest_backbone(active_params: float) -> tuple[float, ModelConfig]:
    """The label (N_act) of the backbone nearest in size, and its configuration."""
    label = min(_SHAPES, key=lambda size: abs(log(size / active_params)))
    hidden, head, ffn = _SHAPES[label]
    return label, ModelConfig(hidden_size=hidden, head_dim=head, ffn_size=ffn)
