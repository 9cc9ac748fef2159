"""The X-MoD residual law, its full candidate, and rivals to hold it against.

Delta = validation loss of X-MoD minus that of the dense model with the same training FLOPs, context and backbone, in
nats per token; negative is a gain (X-MoD, arXiv 2609.34212, eq. 10-16, 24-34). Variables of a run:

    N_act       parameters an average token passes
    ratio       N/N_act, by parameters or by layers
    L           tokens per sequence
    K, A        inverse token sparsity, anchor stride
    C           training FLOPs                               (only `GAIN_BY_COMPUTE`)
    dense_loss  loss of the dense reference, nats per token  (only `MULTIPLICATIVE`)
    D_dense     tokens the dense reference has seen at C     (only `CANDIDATE`)
    D_sparse    tokens the run itself has seen               (only `CANDIDATE`)
"""

from __future__ import annotations

import numpy as np

from megatron_xmod.scaling.separable import Exponent, Factor, Params, ProductForm, Runs, Term

# Table 8. e is an offset; u and w carry the units of N_act (parameters) and L (tokens).
PUBLISHED: Params = {
    "eta_N": 0.07784, "rho_N": 1.19538, "eta_L": 0.92624, "rho_L": 0.48494, "rho_K": 0.79900, "rho_A": 0.28293,
    "e": 0.01848, "u": 0.93519, "w": 105.21108, "z": 0.07455,
}
PUBLISHED_RMSE = 0.008758

# Only to keep numbers near 1 inside the fit; the printed parameters do not depend on them.
_N_SCALE, _L_SCALE, _C_SCALE, _D_SCALE = 3e8, 8192.0, 1e20, 1e10
# An exponent of 0 is the logarithm; the search stops just before it. A change of base size can work either way.
_ETA, _RHO = (-1.0, 3.0), (1e-3, 5.0)


def _variable(name: str):
    return lambda x: x[name]


def sparse_share(A: np.ndarray) -> np.ndarray:
    """omega = 2A/(A+1): the share of the routed depth that is sparse, 1 at A = 1 (eq. 23)."""
    return 2 * A / (A + 1)


def _exposure(x: Runs) -> np.ndarray:
    """Tokens of the dense reference over tokens a sparse layer has seen."""
    return x["D_dense"] * x["K"] / x["D_sparse"]


_OFFSET = Term("e", free=True)
_CAPACITY = Term("u", (Factor("power", _variable("N_act"), "eta_N", _N_SCALE),
                       Factor("fall", _variable("ratio"), "rho_N")), sign=-1.0)
_CONTEXT = Term("w", (Factor("power", _variable("L"), "eta_L", _L_SCALE), Factor("rise", _variable("K"), "rho_L")))
_ANCHOR = Term("z", (Factor("rise", _variable("K"), "rho_K"),
                     Factor("rise", lambda x: sparse_share(x["A"]), "rho_A")), sign=-1.0)
_EXPOSURE = Term("v", (Factor("power", _variable("D_dense"), "eta_D", _D_SCALE), Factor("rise", _exposure, "rho_D")))

_BASE_EXPONENTS = (Exponent("eta_N", *_ETA), Exponent("rho_N", *_RHO), Exponent("eta_L", *_ETA),
                   Exponent("rho_L", *_RHO))
_ANCHOR_EXPONENTS = (Exponent("rho_K", *_RHO), Exponent("rho_A", *_RHO))
_EXPONENTS = _BASE_EXPONENTS + _ANCHOR_EXPONENTS
_TERMS = (_OFFSET, _CAPACITY, _CONTEXT, _ANCHOR)
_VARIABLES = ("N_act", "ratio", "L", "K", "A")

# Eq. 14.
XMOD = ProductForm("xmod", _EXPONENTS, _TERMS, _VARIABLES)
# The two stages of the published fit: A = 1 without the anchor's term, then that term alone.
BASE = ProductForm("base", _BASE_EXPONENTS, _TERMS[:3], _VARIABLES[:4])
ANCHOR = ProductForm("anchor", _ANCHOR_EXPONENTS, (_OFFSET, _ANCHOR), ("K", "A"))
# Eq. 24: with the exposure correction that the paper dropped.
CANDIDATE = ProductForm("candidate", _EXPONENTS + (Exponent("eta_D", *_ETA), Exponent("rho_D", *_RHO)),
                        _TERMS + (_EXPOSURE,), _VARIABLES + ("D_dense", "D_sparse"))


def _times(term: Term, factor: Factor) -> Term:
    return Term(term.coefficient, (*term.factors, factor), term.sign, term.free)


# Rival: the same law as a share of the dense loss.
MULTIPLICATIVE = ProductForm("multiplicative", _EXPONENTS,
                             tuple(_times(t, Factor("given", _variable("dense_loss"))) for t in _TERMS),
                             _VARIABLES + ("dense_loss",))
# Rival: the gains (capacity, anchor) grow with compute as (C/1e20)^kappa.
_COMPUTE = Factor("power", lambda x: _C_SCALE / x["C"], "kappa")
GAIN_BY_COMPUTE = ProductForm("gain_by_compute", _EXPONENTS + (Exponent("kappa", -1.0, 1.0),),
                              (_OFFSET, _times(_CAPACITY, _COMPUTE), _CONTEXT, _times(_ANCHOR, _COMPUTE)),
                              _VARIABLES + ("C",))


def _log_term(coefficient: str, name: str) -> Term:
    return Term(coefficient, (Factor("given", lambda x: np.log(x[name])),), free=True)


# Baseline without any mechanism: linear in the logarithms, L and K also in their product.
LOG_LINEAR = ProductForm(
    "log_linear", (),
    (_OFFSET, _log_term("b_N_act", "N_act"), _log_term("b_L", "L"), _log_term("b_K", "K"), _log_term("b_A", "A"),
     Term("b_LK", (Factor("given", lambda x: np.log(x["L"]) * np.log(x["K"])),), free=True)),
    _VARIABLES)

RIVALS = (CANDIDATE, MULTIPLICATIVE, GAIN_BY_COMPUTE, LOG_LINEAR)
