import numpy as np
import pytest

from megatron_xmod.scaling import plots
from megatron_xmod.scaling.uncertainty import percentile_interval


@pytest.mark.parametrize("draws, scale", [
    (np.r_[np.zeros(40), np.linspace(0.1, 2, 10)], "linear"),  # a coefficient at its bound
    (np.linspace(-0.5, 2, 50), "linear"),
    (np.linspace(-2, -0.5, 50), "linear"),
    (np.zeros(50), "linear"),
    (np.geomspace(0.01, 10, 50), "log"),
])
def test_parameters_of_any_sign_are_drawn(draws, scale):
    low, high = percentile_interval(draws, 0.95)
    figure = plots.parameter_intervals({"z": float(draws[0])}, {"z": (float(low), float(high))}, {"z": draws})
    ax = figure.axes[0]
    assert ax.get_xscale() == scale
    assert sum(bar.get_height() for bar in ax.patches if bar.get_facecolor()[:3] == ax.patches[0].get_facecolor()[:3]) \
        >= 0.9 * len(draws)
