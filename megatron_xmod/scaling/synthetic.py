"""Runs made from a law, on a grid like the paper's: what a fit must give back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_xmod.config.schema import RoutingConfig
from megatron_xmod.flops import flops_per_token_paper, model_plan
from megatron_xmod.scaling.backbones import nearest_backbone
from megatron_xmod.scaling.law import XMOD
from megatron_xmod.scaling.others import CHINCHILLA
from megatron_xmod.scaling.separable import Params, Runs

_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_COMPUTE = {165e6: 3e19, 298e6: 5e19, 556e6: 1e20, 936e6: 1.5e20, 1.65e9: 2.5e20}
_DENSE = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}

Cell = tuple[float, int, int, float]  # N_act, L, K, A


def paper_grid() -> list[Cell]:
    """109 runs: the sweeps of appendix B.4. The text leaves K open but in the A-sweep; the rest is chosen to count up.

    K and L at 556M and A = 1 (61 runs, K = 3 only at 2k), N_act at 32k and A = 1 (24), A at 165M and 32k (24).
    """
    lengths = [(556e6, L, K, 1.0) for L in _LENGTHS for K in range(2, 26, 2)] + [(556e6, 2048, 3, 1.0)]
    sizes = [(N, 32768, K, 1.0) for N in (165e6, 298e6, 936e6) for K in (2, 6, 10, 14, 18, 20, 22, 24)]
    strides = [(165e6, 32768, K, A) for A in (0.5, 1.0, 2.0, 3.0, 4.0, 5.0) for K in (4, 8, 12, 16)]
    return lengths + sizes + strides


def outside_grid() -> list[Cell]:
    """The paper's nine runs outside the range of the fit."""
    return [(556e6, 65536, K, 1.0) for K in (16, 18, 20, 22, 24)] + [(1.65e9, 32768, K, 1.0) for K in (14, 16, 18, 20)]


def variables(cells: list[Cell]) -> Runs:
    """Everything that the laws read, N/N_act by layers; the dense loss is Chinchilla's at the dense twin's tokens."""
    rows = []
    for N_act, L, K, A in cells:
        model = nearest_backbone(N_act)[1]
        model = replace(model, routing=RoutingConfig(K=K, A=A))
        plan, C = model_plan(model), _COMPUTE[N_act]
        dense = replace(model, prefix_layers=None)
        rows.append({"N_act": N_act, "L": L, "K": K, "A": A, "C": C, "ratio": plan.layers / model.active_layers,
                     "D_dense": C / (3 * flops_per_token_paper(dense, L)),
                     "D_sparse": C / (3 * flops_per_token_paper(model, L))})
    x = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
    x["dense_loss"] = CHINCHILLA.predict(_DENSE, {"N": x["N_act"], "D": x["D_dense"]})
    return x


def simulate(x: Runs, params: Params, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Validation losses [n] of the law `XMOD`, with normal noise of standard deviation `noise` nats per token."""
    return x["dense_loss"] + XMOD.predict(params, x) + noise * rng.standard_normal(len(x["L"]))
