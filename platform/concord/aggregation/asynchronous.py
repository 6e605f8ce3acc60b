"""Whether a device computes beside the host, as a GPU does.

There an operation on few numbers costs the host more time than the device, so that one operation for all parameters
takes the place of one for each, and the host reads nothing that it does not need. On a CPU blocks that stay in the
cache are faster.
"""

import contextlib
from collections.abc import Iterator

import torch

_ASKED = False


def is_asynchronous(device: torch.device) -> bool:
    """Whether operations on this device are computed beside the host."""
    return _ASKED or device.type != "cpu"


@contextlib.contextmanager
def as_asynchronous() -> Iterator[None]:
    """Compute on a CPU in the way of a GPU while the body runs: to count its operations, and to compare results."""
    global _ASKED
    before, _ASKED = _ASKED, True
    try:
        yield
    finally:
        _ASKED = before
