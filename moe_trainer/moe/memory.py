"""Keep freed memory in the process: fresh buffers cost page faults, a fifth of a layer's time on a CPU."""

from __future__ import annotations

import ctypes
import sys

# mallopt parameters of glibc, from its malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = -1


def keep_freed_memory() -> bool:
    """Let the C allocator reuse large blocks instead of returning each to the system.

    Large tensors otherwise get fresh pages at every allocation, which the kernel must zero. It is a setting
    of the whole process, so a program decides on it, not the layer; `moe-train` does. Memory that was used
    once stays with the process, and the heap grows over the first few steps: an aligned block needs a hole
    a little larger than itself.

    Returns:
        Whether the C library has the setting (glibc on Linux).
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
