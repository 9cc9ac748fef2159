import importlib.util

import pytest
import torch

GPU = torch.cuda.is_available()


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.cuda) if GPU else "interpreter"])
def device():
    """Where Triton kernels run: on the GPU if there is one, or else in Triton's interpreter on the CPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return torch.device("cuda" if GPU else "cpu")
