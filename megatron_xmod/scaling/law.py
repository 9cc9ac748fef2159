"""The laws: X-MoD's with its full candidate and rivals to hold it against, and those of dense and of routed models.

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

Chinchilla, Kaplan and Clark come last; public data of theirs are the bench for the fitting code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_xmod.scaling.separable import Coefficient, Exponent, Factor, Form, Params, ProductForm, Runs, Term

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
FORMS: dict[str, ProductForm] = {form.name: form for form in (XMOD, BASE, *RIVALS)}
# Parameters with which a wider law is the law itself.
REDUCED: dict[str, Params] = {CANDIDATE.name: {"v": 0.0, "eta_D": 0.3, "rho_D": 0.5},
                              GAIN_BY_COMPUTE.name: {"kappa": 0.0}}


# Loss in nats per token of a dense model of N parameters after D tokens: E + A/N^alpha + B/D^beta
# (Hoffmann et al., arXiv 2203.15556).
CHINCHILLA = ProductForm(
    "chinchilla", (Exponent("alpha", 0.01, 2.0), Exponent("beta", 0.01, 2.0)),
    (Term("E"), Term("A", (Factor("power", lambda x: x["N"], "alpha", 1e9),)),
     Term("B", (Factor("power", lambda x: x["D"], "beta", 1e10),))),
    ("N", "D"))


@dataclass(frozen=True)
class Kaplan(Form):
    """Loss = scale * [(N/1e9)^-gamma + r * (D/1e10)^-1]^alpha_D, gamma = alpha_N/alpha_D, r = exp(log_r).

    The same as [(Nc/N)^(alpha_N/alpha_D) + Dc/D]^alpha_D (Kaplan et al., arXiv 2001.08361, eq. 1.5); `constants`
    gives alpha_N, Nc and Dc.
    """

    name: str = "kaplan"
    exponents: tuple[Exponent, ...] = (Exponent("gamma", 0.05, 3.0), Exponent("log_r", -8.0, 8.0),
                                       Exponent("alpha_D", 0.005, 1.0))
    coefficients: tuple[Coefficient, ...] = (Coefficient("scale"),)
    variables: tuple[str, ...] = ("N", "D")

    def basis(self, theta, x):
        gamma, log_r, alpha = theta
        log_n = np.log(x["N"] / 1e9)
        size = np.exp(-gamma * log_n)
        data = np.exp(log_r) * 1e10 / x["D"]
        both = size + data
        value = both**alpha
        slopes = [-alpha * value / both * log_n * size, alpha * value / both * data, value * np.log(both)]
        return value[:, None], np.array(slopes)[:, :, None]

    def scales(self, theta):
        return np.ones(1)

    @staticmethod
    def constants(params: dict[str, float]) -> dict[str, float]:
        """alpha_N, alpha_D, Nc (parameters) and Dc (tokens)."""
        gamma, alpha = params["gamma"], params["alpha_D"]
        inner = params["scale"] ** (1 / alpha)
        return {"alpha_N": gamma * alpha, "alpha_D": alpha, "Nc": 1e9 * inner ** (1 / gamma),
                "Dc": 1e10 * inner * float(np.exp(params["log_r"]))}


@dataclass(frozen=True)
class Clark(Form):
    """log10 loss = a*log10 N + b*log10 E' + c*log10 N*log10 E' + d (Clark et al., arXiv 2202.01169).

    N: parameters of the dense model; E: experts. E' saturates from E_start to E_max:
    1/E' = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max. Inside, the exponents are ln E_start and
    ln(E_max/E_start), which keeps E_max above E_start.
    """

    name: str = "routed"
    exponents: tuple[Exponent, ...] = (Exponent("log_E_start", -1.0, 3.0), Exponent("log_E_span", 0.5, 12.0))
    coefficients: tuple[Coefficient, ...] = tuple(Coefficient(name, True) for name in "abcd")
    variables: tuple[str, ...] = ("N", "experts")

    def basis(self, theta, x):
        log_n = np.log10(x["N"] / 1e9)
        value, slopes = _saturated(theta, x["experts"])
        one, zero = np.ones_like(log_n), np.zeros_like(log_n)
        columns = np.stack([log_n, value, log_n * value, one], axis=1)
        return columns, np.stack([np.stack([zero, s, log_n * s, zero], axis=1) for s in slopes])

    def to_public(self, theta, c):
        a, b, cross, d = c
        params = {"a": a, "b": b - 9 * cross, "c": cross, "d": d - 9 * a}
        return {name: float(value) for name, value in (params | self.experts(theta)).items()}

    def from_public(self, params):
        theta = np.log([params["E_start"], params["E_max"] / params["E_start"]])
        a, cross = params["a"], params["c"]
        return theta, np.array([a, params["b"] + 9 * cross, cross, params["d"] + 9 * a])

    @staticmethod
    def experts(theta) -> dict[str, float]:
        return {"E_start": np.exp(theta[0]), "E_max": np.exp(theta[0] + theta[1])}


def _saturated(theta: np.ndarray, experts: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """log10 E' [n] and its two derivatives."""
    start, span = np.exp(theta)
    top = start * span
    shift = start * span / (span - 1)  # 1/(1/E_start - 1/E_max)
    inner = experts - 1 + shift
    inverse = 1 / inner + 1 / top
    by_shift = 1 / (inner**2 * inverse)
    by_top = 1 / (top * inverse)
    d_start = by_shift * shift + by_top
    d_span = -by_shift * shift / (span - 1) + by_top
    return -np.log10(inverse), [d_start / np.log(10), d_span / np.log(10)]


KAPLAN = Kaplan()
CLARK = Clark()
