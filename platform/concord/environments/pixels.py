"""Pixels as numbers in [0, 1], whatever they are kept as."""

from torch import Tensor


def in_unit_interval(frames: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]; what is no bytes as it is."""
    return frames if frames.is_floating_point() else frames.float() / 255
