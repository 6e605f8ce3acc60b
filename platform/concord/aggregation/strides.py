"""The strides that PyTorch gives a parameter's gradient and state."""

import torch
from torch import Tensor


def match_strides(value: Tensor, parameter: Tensor) -> Tensor:
    """``value`` with the strides of ``parameter``, as PyTorch gives a gradient; ``value`` itself if it has them.

    Fused optimizers walk through a parameter, its gradient and its state side by side in memory, so that other strides
    pair components that do not belong together. For a parameter with gaps or overlaps in memory the result is dense.
    """
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
