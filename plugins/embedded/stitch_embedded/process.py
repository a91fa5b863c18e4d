"""What the engine asks of the process that it runs in."""

from __future__ import annotations

import contextlib
import ctypes

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def settle() -> None:
    """One torch thread, for results that do not depend on the batch; and freed memory is kept.

    glibc would hand the large buffers of each forward back to the system and fault them in again for the
    next, which takes longer than the arithmetic. Call it on each thread that computes: some of torch's
    libraries keep the number of threads per thread.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_TOP_PAD, 64 << 20)
        mallopt(_M_ARENA_MAX, 1)
