"""Laws of dense and of routed models: Chinchilla, Kaplan, Clark. Public data make them a bench for the fitting code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_xmod.scaling.separable import Coefficient, Exponent, Factor, Form, ProductForm, Term

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
