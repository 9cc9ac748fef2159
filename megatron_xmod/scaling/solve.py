"""The two solvers behind every fit: constrained linear least squares, and Levenberg-Marquardt for robust losses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np

# Relative decrease of the objective below which a fit has ended.
_TOLERANCE = 1e-13
_LARGEST_DAMPING = 1e10


def linear(columns: np.ndarray, y: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The coefficients [q] of least squares y ~ columns @ c, those not `free` at least 0.

    The problem is convex, so the best admissible solution over the sets of coefficients held at 0 is the solution.

    Args:
        columns: [n, q]. y: [n]. free: [q], bool.
    """
    best = _least_squares(columns, y)
    if np.all(best[~free] >= 0):
        return best
    bound = np.flatnonzero(~free)
    best, best_error = np.zeros(len(free)), np.inf
    for count in range(len(bound), 0, -1):
        for zeros in combinations(bound, count):
            kept = np.setdiff1d(np.arange(len(free)), zeros)
            c = np.zeros(len(free))
            c[kept] = _least_squares(columns[:, kept], y)
            error = np.sum((columns @ c - y) ** 2)
            if np.all(c[~free] >= 0) and error < best_error:
                best, best_error = c, error
    return best


def _least_squares(columns: np.ndarray, y: np.ndarray) -> np.ndarray:
    size = np.sqrt(np.sum(columns**2, axis=0))
    size[size == 0] = 1.0
    return np.linalg.lstsq(columns / size, y, rcond=1e-13)[0] / size


def objective(residual: np.ndarray, weights: np.ndarray, delta: float) -> float:
    """Sum of Huber losses: r^2/2 up to |r| = delta, delta*|r| - delta^2/2 beyond. delta = inf is least squares."""
    size = np.abs(residual)
    inside = size <= delta
    loss = np.where(inside, 0.5 * residual**2, 0.0)
    if not inside.all():
        loss += np.where(inside, 0.0, delta * (size - 0.5 * delta))
    return float(loss @ weights)


def levenberg(evaluate: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], x: np.ndarray, low: np.ndarray,
              high: np.ndarray, weights: np.ndarray, delta: float = np.inf, max_steps: int = 300) -> np.ndarray:
    """A local minimum of `objective` within bounds.

    Each step solves a quadratic model: residuals inside delta have their Gauss-Newton curvature; those outside none
    (their loss is linear) or, scaled by the damping, that of the parabola which touches the loss from above. Full
    damping is thus a majorising step, none is Newton's.

    Args:
        evaluate: x [m] -> residuals [n], Jacobian [n, m].
        weights: [n], at least 0.
    """
    residual, jacobian = evaluate(x)
    value = objective(residual, weights, delta)
    damping = 1e-2 if np.isinf(delta) else 1.0
    small_steps = 0
    for _ in range(max_steps):
        step = _step(residual, jacobian, weights, delta, damping, x, low, high)
        trial = np.clip(x + step, low, high)
        new_residual, new_jacobian = evaluate(trial)
        new = objective(new_residual, weights, delta)
        if not new < value:  # also where it is not a number
            damping = max(4 * damping, 1e-8)
            if damping > _LARGEST_DAMPING:
                break
            continue
        small_steps = small_steps + 1 if value - new <= _TOLERANCE * value else 0
        x, residual, jacobian, value = trial, new_residual, new_jacobian, new
        damping /= 5
        if small_steps == 2 or value == 0:
            break
    return x


def _step(residual, jacobian, weights, delta, damping, x, low, high) -> np.ndarray:
    size = np.abs(residual)
    inside = size <= delta
    touching = weights * np.where(inside, 1.0, delta / np.maximum(size, 1e-300))
    gradient = jacobian.T @ (touching * residual)
    moving = ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))
    if not moving.any():
        return np.zeros_like(x)
    J = jacobian[:, moving]
    newton = (J.T * np.where(inside, touching, 0.0)) @ J
    majorant = (J.T * touching) @ J
    scale = np.maximum(np.diag(majorant), 1e-300)
    curvature = newton + damping * np.diag(scale)
    if not inside.all():
        curvature += min(damping, 1.0) * (majorant - newton)
    root = np.sqrt(scale)
    step = np.zeros_like(x)
    try:
        step[moving] = -np.linalg.solve(curvature / np.outer(root, root), gradient[moving] / root) / root
    except np.linalg.LinAlgError:
        step[moving] = -gradient[moving] / scale  # a flat direction without damping; the next try is damped
    return step
