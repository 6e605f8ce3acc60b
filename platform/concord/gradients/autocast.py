"""Layers in lower precision, the loss in float32."""

from collections.abc import Callable

import torch
from torch import Tensor


def outputs_of(model: Callable[[Tensor], Tensor], inputs: Tensor, autocast: torch.dtype | None) -> Tensor:
    """The model's outputs, its layers computing in this type; outputs are float32 then. None: as they are."""
    if autocast is None:
        return model(inputs)
    with torch.autocast(inputs.device.type, autocast):
        outputs = model(inputs)
    return outputs.float()
