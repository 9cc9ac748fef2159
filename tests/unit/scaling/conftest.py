import pytest

from megatron_xmod.scaling.fit import Fit, fit
from megatron_xmod.scaling.recovery import drawn


@pytest.fixture(scope="session")
def noisy() -> Fit:
    """The law fitted to the paper's grid with the paper's noise."""
    return fit(drawn(0))
