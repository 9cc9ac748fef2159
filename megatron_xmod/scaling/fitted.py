"""A fitted law with what is needed to trust it: the range of its data, its scatter, its uncertainty. The published one,
or one from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.fit import Fit, Problem, refit
from megatron_xmod.scaling.law import BASE, GAIN_BY_COMPUTE, PUBLISHED, PUBLISHED_RMSE, XMOD
from megatron_xmod.scaling.recovery import paper_grid, simulate, variables
from megatron_xmod.scaling.separable import Params, ProductForm, Runs
from megatron_xmod.scaling.uncertainty import expanded_share, percentile_interval

LEVEL = 0.8  # of all intervals of predictions
# The laws that a question can be put to: it gives all their variables.
_FORMS = {form.name: form for form in (XMOD, BASE, GAIN_BY_COMPUTE)}
# How often the published law is fitted again to runs drawn from itself.
_PUBLISHED_DRAWS = 200
_PUBLISHED_FROM = ("refits, each started at the published parameters, to runs simulated from them on our reading of "
                   "the paper's grid, whose K the paper leaves open; its own runs are not public")


@dataclass(frozen=True)
class FittedLaw:
    """A law and its evidence.

    Attributes:
        source: Where it comes from, for people.
        form, params: The law.
        domain: Smallest and largest tested value of N_act, L, K, A (and C, where the law has it).
        stride_domain: The same for N_act, L and K among the runs with A != 1; empty where there are none.
        rmse: Scatter of the runs about the law, nats.
        draws: Parameters of refits, which the intervals and P(best) come from.
        draws_from: What the refits are.
        share: The central share of the refits that makes an interval at `LEVEL`.
    """

    source: str
    form: ProductForm
    params: Params
    domain: dict[str, tuple[float, float]]
    stride_domain: dict[str, tuple[float, float]]
    rmse: float
    draws: list[Params]
    draws_from: str = "bootstrap refits to its runs"
    share: float = LEVEL

    def predict(self, x: Runs) -> np.ndarray:
        """Delta [n], nats against the dense reference."""
        return self.form.predict(self.params, x)

    def predict_draws(self, x: Runs) -> np.ndarray:
        """Delta under every bootstrap refit [draws, n]."""
        return np.array([self.form.predict(draw, x) for draw in self.draws])

    def interval(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ends [n] of the intervals at `LEVEL` of what the refits give [draws, n]."""
        return percentile_interval(values, self.share)


def published_law() -> FittedLaw:
    """Table 8's law. Its runs are not public, so it is refitted to runs drawn from itself with its scatter."""
    x = variables(paper_grid())
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(_PUBLISHED_DRAWS):
        y = simulate(x, PUBLISHED, PUBLISHED_RMSE, rng)
        start = Fit(Problem(XMOD, x, y, x["dense_loss"]), PUBLISHED, np.inf)
        draws.append(refit(start).params)
    domain = {"N_act": (165e6, 936e6), "L": (2048.0, 32768.0), "K": (2.0, 24.0), "A": (0.5, 5.0)}
    strides = {"N_act": (165e6, 165e6), "L": (32768.0, 32768.0), "K": (4.0, 16.0)}
    return FittedLaw("arXiv 2609.34212, table 8", XMOD, PUBLISHED, domain, strides, PUBLISHED_RMSE, draws,
                     _PUBLISHED_FROM)


# Table 9: runs of the paper outside the sweeps of its law. N_act, L and the dense loss of all; then K -> N/N_act and
# validation loss, at A = 1, 52 active layers of the 165M width, C = 4e19.
_TABLE_9 = {"N_act": 256e6, "L": 32768.0, "dense_loss": 3.084}
_TABLE_9_ROWS = {4: (2.16, 3.047), 8: (3.67, 3.034), 12: (5.04, 3.023), 16: (6.52, 3.011)}


class Misfit(NamedTuple):
    """Measured and predicted loss of one row against its dense reference, nats."""

    K: int
    measured: float
    predicted: float


def table9_misfit() -> list[Misfit]:
    """What table 8's law predicts for table 9."""
    K = np.array(list(_TABLE_9_ROWS), dtype=float)
    ratio, loss = np.array(list(_TABLE_9_ROWS.values())).T
    one = np.ones_like(K)
    x = {"N_act": one * _TABLE_9["N_act"], "L": one * _TABLE_9["L"], "K": K, "A": one, "ratio": ratio}
    predicted = XMOD.predict(PUBLISHED, x)
    measured = np.round(loss - _TABLE_9["dense_loss"], 3)
    return [Misfit(*row) for row in zip(_TABLE_9_ROWS, measured.tolist(), predicted.tolist(), strict=True)]


def data_domain(x: Runs) -> dict[str, dict[str, tuple[float, float]]]:
    """The range of each variable in the data, as `read_law` wants it."""
    strides = x["A"] != 1
    return {"domain": {name: _ends(x[name]) for name in ("N_act", "L", "K", "A", "C")},
            "stride_domain": {name: _ends(x[name][strides]) for name in ("N_act", "L", "K") if strides.any()}}


def _ends(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def read_law(path: str | Path) -> FittedLaw:
    """A law saved by `fit_law.py xmod --json`.

    Raises:
        UserError: it can't be read, or is not such a file.
    """
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--law {path} can't be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"--law {path} is not JSON: {error}.") from error
    try:
        law = _saved_law(str(path), saved)
        kappa_known = law.form is not GAIN_BY_COMPUTE or _kappa_is_known(law, saved)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"--law {path} is not a law saved by 'fit_law.py xmod --json' with one of the laws "
                        f"{', '.join(_FORMS)}: {reason}.") from error
    if not kappa_known:
        raise UserError(f"--law {path}: its runs do not tell how the gain grows with compute (kappa = "
                        f"{law.params['kappa']:g}, at the end of the search or with an interval that reaches it). Fit "
                        "the law xmod, add runs at other C, or hold kappa with --fix kappa=VALUE.")
    if not law.draws:
        raise UserError(f"--law {path} has no bootstrap draws; fit it again with --bootstrap above 0.")
    return law


def _saved_law(source: str, saved: dict) -> FittedLaw:
    if not isinstance(saved, dict):
        raise ValueError("it holds no JSON object")
    if saved["law"] not in _FORMS:
        raise ValueError(f"its law is {saved['law']!r}")
    form = _FORMS[saved["law"]]
    domain, strides = ({name: _range(f"{key}.{name}", ends) for name, ends in saved[key].items()}
                       for key in ("domain", "stride_domain"))
    for name in ("N_act", "L", "K", "A", *({"C"} & set(form.variables))):
        if name not in domain:
            raise KeyError(f"domain.{name}")
    return FittedLaw(source, form, _finite(form, saved), domain, strides, float(saved["scores"]["rmse"]),
                     [_finite(form, draw) for draw in saved["draws"]], share=_share(form, saved))


def _finite(form: ProductForm, values: dict) -> Params:
    for name in form.names:
        if not np.isfinite(float(values[name])):
            raise ValueError(f"{name} is {values[name]}")
    return {name: float(values[name]) for name in form.names}


def _range(name: str, ends: list) -> tuple[float, float]:
    low, high = map(float, ends)
    if not 0 < low <= high < np.inf:
        raise ValueError(f"{name} is {ends}, but a range goes from a number above 0 to a finite one not below it")
    return low, high


def _share(form: ProductForm, saved: dict) -> float:
    if "clusters" not in saved:  # a file of before it was saved, or one without refits
        return LEVEL
    free = len(form.names) - len(saved.get("fixed") or {})
    return expanded_share(LEVEL, int(saved["scores"]["runs"]), int(saved["clusters"]), free)


def _kappa_is_known(law: FittedLaw, saved: dict) -> bool:
    """Whether kappa was held, or neither it nor its profile nor its refits reach the ends of the search."""
    if "kappa" in (saved.get("fixed") or {}):
        return True
    exponent = next(e for e in law.form.exponents if e.name == "kappa")
    profile = (saved.get("profiles") or {}).get("kappa") or {}
    values = [law.params["kappa"], *(profile[end] for end in ("from", "to") if end in profile)]
    if law.draws:
        values += np.percentile([draw["kappa"] for draw in law.draws], [2.5, 97.5]).tolist()
    return exponent.low + 1e-3 < min(values) and max(values) < exponent.high - 1e-3
