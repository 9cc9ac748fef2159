"""From a sweep to what can be fitted to it. Options and sweeps from which the law asked for can't be had are refused
with a UserError."""

from __future__ import annotations

import numpy as np

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.data import Sweep
from megatron_xmod.scaling.fit import Problem
from megatron_xmod.scaling.separable import Form

_OUTSIDE_BY = ("N_act", "L", "K", "A", "C")


def sweep_problem(sweep: Sweep, form: Form, loss: str, log: bool) -> Problem:
    """The law on the runs of a sweep, which must have its variables."""
    missing = [name for name in form.variables if name not in sweep.x]
    if missing:
        columns = {"D_dense": "dense_tokens", "D_sparse": "tokens"}
        raise UserError(f"the law {form.name} needs the columns {', '.join(columns.get(m, m) for m in missing)}, "
                        "filled in every row.")
    return Problem(form, sweep.x, sweep.loss, sweep.x["dense_loss"], log, loss)


def require_fixed(form: Form, fixed: dict[str, float]) -> None:
    """Refuses to hold what is no exponent of the law, or at a value outside its search range."""
    exponents = {e.name: e for e in form.exponents}
    for name, value in fixed.items():
        if name not in exponents:
            raise UserError(f"--fix {name}: the law {form.name} has the exponents {', '.join(exponents) or 'none'}.")
        low, high = exponents[name].low, exponents[name].high
        if not low <= value <= high:
            raise UserError(f"--fix {name}={value:g} is out of range: {name} must be from {low:g} to {high:g}.")


def require_spread(problem: Problem, fixed: dict[str, float]) -> None:
    """Refuses data that leave an exponent without anything to act on."""
    needs = {"eta_N": ("N_act", 2), "eta_L": ("L", 2), "rho_L": ("K", 3), "rho_K": ("K", 3), "rho_A": ("A", 2)}
    require_budgets(problem, fixed)
    wanting = []
    for exponent in problem.form.exponents:
        variable, count = needs.get(exponent.name, ("K", 1))
        found = len(np.unique(problem.x[variable]))
        if exponent.name not in fixed and found < count:
            wanting.append((exponent.name, f"{exponent.name} needs runs at {count} or more values of {variable}, but "
                            f"there are runs at {found}"))
    if wanting:
        way = " ".join(f"--fix {name}=VALUE" for name, _ in wanting)
        base = ", or fit --form base" if "rho_A" in dict(wanting) else ""
        raise UserError(f"{'; '.join(reason for _, reason in wanting)}. Add runs, or hold with {way}{base}.")


def require_budgets(problem: Problem, fixed: dict[str, float]) -> None:
    """Refuses data that do not tell compute from size."""
    if "kappa" in fixed or "kappa" not in problem.form.names:
        return
    C, size = problem.x["C"], problem.x["N_act"]
    if all(len(np.unique(budgets(C[size == value]))) == 1 for value in np.unique(size)):
        raise UserError("kappa needs runs at 2 or more values of C at the same N_act, which this sweep has not. Add "
                        "runs at another budget, or hold it with --fix kappa=VALUE.")


def budgets(C: np.ndarray) -> np.ndarray:
    """The smallest C of the same budget, for each run [n]. C within 5 % are one, which whole steps have split."""
    result = np.empty_like(C)
    first = -np.inf
    for i in np.argsort(C, kind="stable"):
        first = first if C[i] <= 1.05 * first else C[i]
        result[i] = first
    return result


def matches(sweep: Sweep, outside: list[tuple[str, float]]) -> np.ndarray:
    """Which runs are to be kept out of the fit [n]: those with one of the values (variable, value)."""
    mask = np.zeros(len(sweep.loss), dtype=bool)
    for name, value in outside:
        if name not in _OUTSIDE_BY:
            raise UserError(f"--hold-out {name}={value:g}: runs are kept out by {', '.join(_OUTSIDE_BY)}, not by "
                            f"{name!r}.")
        found = np.isclose(sweep.x[name], value, rtol=1e-6)
        if not found.any():
            raise UserError(f"--hold-out {name}={value:g} matches no run; {name} takes the values "
                            f"{', '.join(f'{v:g}' for v in np.unique(sweep.x[name]))}.")
        mask |= found
    return mask
