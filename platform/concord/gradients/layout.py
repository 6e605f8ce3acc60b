"""Where each trainable parameter lies in one flat run of components."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from concord.aggregation.rule import accumulation_dtype


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a model, one after the other.

    Attributes:
        names: names of the parameters, in the order of ``named_parameters()``.
        shapes: their shapes.
        offsets: where each begins, and at the end the number of components.
        dtype: the dtype in which their gradients are summed.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(parameters: Mapping[str, Tensor]) -> "Layout":
        """The layout of these parameters, in this order."""
        offsets = [0]
        for parameter in parameters.values():
            offsets.append(offsets[-1] + parameter.numel())
        return Layout(
            tuple(parameters),
            tuple(parameter.shape for parameter in parameters.values()),
            tuple(offsets),
            accumulation_dtype(parameter.dtype for parameter in parameters.values()),
        )

    @property
    def components(self) -> int:
        """How many components there are in all."""
        return self.offsets[-1]

    def part(self, flat: Tensor, index: int) -> Tensor:
        """The view of parameter ``index`` in ``flat``, shaped as the parameter."""
        return flat[self.offsets[index] : self.offsets[index + 1]].view(self.shapes[index])


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that want a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
