"""How the C library hands out memory to a process that trains on the CPU."""

from __future__ import annotations

import ctypes
import sys

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed, for the next tensor, instead of returning it to the system.

    By default every large tensor is mapped afresh, and the system zeroes it page by page as it is first written: on the
    CPU that costs as much as the element-wise operators themselves. Other C libraries are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # off
