"""Where there is no GPU, Triton's interpreter runs our kernels.

It is chosen for good when triton and the kernels are imported. So they are imported here, before any test module brings
triton in, and the switch is taken back: neither other tests nor the programs that they start see it.
"""

import importlib.util
import os

import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # noqa: F401, the first launch would import it

    from megatron_xmod.kernels import triton_gated, triton_norm, triton_select  # noqa: F401

    del os.environ["TRITON_INTERPRET"]
