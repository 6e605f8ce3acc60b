"""What is put around a model before it is exported. Imports PyTorch, so it is imported where a model is at hand."""

import torch
from torch import Tensor, nn


class Casting(nn.Module):
    """A model behind a cast of its inputs, so that numbers of any type may be given to it.

    Args:
        model: maps inputs of `dtype` to outputs.
        dtype: what the inputs become.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's outputs for `inputs` of any type."""
        # Not inputs.to(dtype): the exporter writes down the type of the example with it, and refuses all others.
        outputs: Tensor = self.model(torch.empty_like(inputs, dtype=self.dtype).copy_(inputs))
        return outputs
