import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_ahead.py")


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), "90"], capture_output=True, text=True,
                          env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
