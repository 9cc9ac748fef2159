"""Table 9 of the paper: runs outside the sweeps of its law, to see what the law says about them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_xmod.scaling.law import PUBLISHED, XMOD

_N_ACT, _LENGTH, _DENSE_LOSS = 256e6, 32768.0, 3.084
# K -> N/N_act and validation loss, at A = 1, 52 active layers of the 165M width, C = 4e19.
_ROWS = {4: (2.16, 3.047), 8: (3.67, 3.034), 12: (5.04, 3.023), 16: (6.52, 3.011)}


class Misfit(NamedTuple):
    """Measured and predicted loss of one row against its dense reference, nats."""

    K: int
    measured: float
    predicted: float


def table9_misfit() -> list[Misfit]:
    """What table 8's law predicts for table 9."""
    K = np.array(list(_ROWS), dtype=float)
    ratio, loss = np.array(list(_ROWS.values())).T
    one = np.ones_like(K)
    x = {"N_act": one * _N_ACT, "L": one * _LENGTH, "K": K, "A": one, "ratio": ratio}
    predicted = XMOD.predict(PUBLISHED, x)
    measured = np.round(loss - _DENSE_LOSS, 3)
    return [Misfit(*row) for row in zip(_ROWS, measured.tolist(), predicted.tolist(), strict=True)]
