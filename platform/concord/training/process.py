"""Settings for the speed of a training process: denormal numbers, threads, freed memory."""

import ctypes
import os
import sys

import numpy as np
import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h


def own_cores() -> int:
    """The number of cores this process may use, which can be fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tune_process(threads: int | None = None, most: int | None = None) -> None:
    """Prepare this process for training. Results change only by the rounding of denormal numbers.

    * Denormal numbers become zero: they slow a collapsed network tenfold.
    * glibc keeps freed memory for the next step instead of giving it back to the system. Otherwise each step's
      gradients are new pages to be zeroed, a fifth of the gradient's time for 32 stacked environments of a small
      network.

    Args:
        threads: threads for PyTorch's operators, never more than :func:`own_cores`, where they would wait for each
            other; None leaves PyTorch's choice.
        most: the most threads that the user allows, if there is a limit.
    """
    for kind in (np.float32, np.float64):
        np.finfo(kind)  # caches its smallest numbers now; later it would warn of zeros
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(min(threads, own_cores(), most or threads))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
            libc.mallopt(_M_TOP_PAD, 64 << 20)
