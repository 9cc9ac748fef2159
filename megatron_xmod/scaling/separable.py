"""Laws that are linear in some of their parameters: y = base + sum_j c_j * phi_j(x; exponents).

Inside, the columns phi are scaled so that they stay of order 1 and finite when an exponent goes to 0; `to_public` gives
the parameters as they are printed. Shapes: n runs, p exponents, q coefficients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Runs = dict[str, np.ndarray]  # one array of n values per variable
Params = dict[str, float]


class Exponent(NamedTuple):
    """A parameter that the columns are not linear in, with its search range."""

    name: str
    low: float
    high: float


class Coefficient(NamedTuple):
    """A parameter that the columns are linear in. `free`: it may be negative."""

    name: str
    free: bool = False


class Form:
    """A law. Subclasses give `basis` and the scaling of the coefficients."""

    name: str
    exponents: tuple[Exponent, ...]
    coefficients: tuple[Coefficient, ...]
    variables: tuple[str, ...]

    def basis(self, theta: np.ndarray, x: Runs) -> tuple[np.ndarray, np.ndarray]:
        """Columns [n, q] and their derivatives to the exponents [p, n, q]."""
        raise NotImplementedError

    def scales(self, theta: np.ndarray) -> np.ndarray:
        """Printed coefficient over inner coefficient [q]."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(e.name for e in self.exponents) + tuple(c.name for c in self.coefficients)

    @property
    def low(self) -> np.ndarray:
        return np.array([e.low for e in self.exponents])

    @property
    def high(self) -> np.ndarray:
        return np.array([e.high for e in self.exponents])

    @property
    def free(self) -> np.ndarray:
        """Which coefficients may be negative [q]."""
        return np.array([c.free for c in self.coefficients])

    def to_public(self, theta: np.ndarray, c: np.ndarray) -> Params:
        """Inner values as printed parameters."""
        values = np.concatenate([theta, c * self.scales(theta)])
        return dict(zip(self.names, map(float, values), strict=True))

    def from_public(self, params: Params) -> tuple[np.ndarray, np.ndarray]:
        """Printed parameters as inner values: exponents [p] and coefficients [q]."""
        theta = np.array([params[e.name] for e in self.exponents])
        return theta, np.array([params[c.name] for c in self.coefficients]) / self.scales(theta)

    def predict(self, params: Params, x: Runs) -> np.ndarray:
        """The law's value for each run [n]."""
        theta, c = self.from_public(params)
        return self.basis(theta, x)[0] @ c


@dataclass(frozen=True)
class Factor:
    """One factor of a term.

    kind: "power": (v/scale)^-p. "rise": (v^p - 1)/p, which goes to ln v. "fall": (1 - v^-p)/p. "given": v itself.
    """

    kind: str
    variable: Callable[[Runs], np.ndarray]
    parameter: str | None = None
    scale: float = 1.0

    def value_and_slope(self, p: float, x: Runs) -> tuple[np.ndarray, np.ndarray | None]:
        v = self.variable(x)
        if self.kind == "given":
            return v, None
        if self.kind == "power":
            log = np.log(v / self.scale)
            value = np.exp(-p * log)
            return value, -log * value
        sign = 1.0 if self.kind == "rise" else -1.0
        log = sign * np.log(v)
        value = np.expm1(p * log) / p
        return sign * value, sign * (log * np.exp(p * log) - value) / p

    def to_printed(self, p: float) -> float:
        """What this factor puts into the printed coefficient."""
        if self.kind == "given":
            return 1.0
        return self.scale**p if self.kind == "power" else 1 / p


@dataclass(frozen=True)
class Term:
    """sign * coefficient * product of factors."""

    coefficient: str
    factors: tuple[Factor, ...] = ()
    sign: float = 1.0
    free: bool = False


@dataclass(frozen=True)
class ProductForm(Form):
    """A sum of terms, each a coefficient times powers of the run's variables."""

    name: str
    exponents: tuple[Exponent, ...]
    terms: tuple[Term, ...]
    variables: tuple[str, ...]

    @property
    def coefficients(self) -> tuple[Coefficient, ...]:
        return tuple(Coefficient(term.coefficient, term.free) for term in self.terms)

    def basis(self, theta, x):
        place = {e.name: i for i, e in enumerate(self.exponents)}
        n = len(x[self.variables[0]])
        columns = np.empty((n, len(self.terms)))
        slopes = np.zeros((len(theta), n, len(self.terms)))
        for j, term in enumerate(self.terms):
            parts = [factor.value_and_slope(theta[place[factor.parameter]] if factor.parameter else 0.0, x)
                     for factor in term.factors]
            columns[:, j] = term.sign
            for value, _ in parts:
                columns[:, j] *= value
            for k, factor in enumerate(term.factors):
                if factor.parameter:
                    others = [value for i, (value, _) in enumerate(parts) if i != k]
                    slopes[place[factor.parameter], :, j] += term.sign * np.prod([parts[k][1], *others], axis=0)
        return columns, slopes

    def scales(self, theta):
        value = dict(zip((e.name for e in self.exponents), theta, strict=True))
        return np.array([np.prod([f.to_printed(value.get(f.parameter, 0.0)) for f in term.factors])
                         for term in self.terms])

    def parts(self, params: Params, x: Runs) -> dict[str, np.ndarray]:
        """Each term's contribution to the law [n], by the name of its coefficient."""
        theta, c = self.from_public(params)
        columns = self.basis(theta, x)[0] * c
        return {term.coefficient: columns[:, j] for j, term in enumerate(self.terms)}
