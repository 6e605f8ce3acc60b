"""Leaves a process as a call of the interface has found it, so that a second training is as the first."""

import contextlib
import logging
import os
import random
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from concord.logs import show_warnings_in_one_line
from concord.storage import disk_errors_in_one_line

# The loggers of Ray whose level a session or a pool changes.
_LOGGERS = ("ray", "ray.tune", "ray.train")


# Calls of other threads wait: what they change and restore is of the whole process. A call may be within another.
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Restore environment variables, random states, threads and log levels after the body; a disk's error is one line,
    as a warning of Concord is.

    Sessions of Ray and signal handlers are restored by who changes them.
    """
    flushes = not torch.tensor(1e-40).mul(1.0).item()  # denormal numbers: PyTorch does not tell its setting
    variables, threads = dict(os.environ), torch.get_num_threads()
    formatting, levels = warnings.formatwarning, {name: logging.getLogger(name).level for name in _LOGGERS}
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with _ONE_AT_A_TIME, disk_errors_in_one_line(), warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            show_warnings_in_one_line()
            yield
    finally:
        warnings.formatwarning = formatting
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushes)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
