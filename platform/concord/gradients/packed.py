"""Gradients of several parameters side by side, so that on a GPU one operation maps those of all."""

import torch
from torch import Tensor

from concord.gradients.layout import Layout

# Bytes of gradients side by side: enough to keep a GPU busy; what statistics form of them has room beside them.
_BYTES = 1 << 28
# Bytes of a parameter's gradients that are formed though matrix products give its sums without, in more operations.
_FEW_BYTES = 1 << 24


class Packed:
    """Environments' gradients that wait for those of other parameters.

    Args:
        layout: of the model's parameters.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._waiting: dict[int, Tensor] = {}
        self._bytes = 0

    def takes(self, index: int, groups: int, *, products: bool) -> bool:
        """Whether gradients of parameter ``index`` are few enough to be formed; with ``products`` sums need none."""
        size = groups * self._layout.shapes[index].numel() * self._layout.dtype.itemsize
        return size <= (_FEW_BYTES if products else _BYTES)

    def has_room(self, index: int, environments: int) -> bool:
        """Whether the gradients of parameter ``index`` can wait with those that wait already."""
        waiting = next(iter(self._waiting.values()), None)
        fits = self._bytes <= _BYTES and index not in self._waiting
        return waiting is None or (fits and len(waiting) == environments)

    def add(self, index: int, gradients: Tensor) -> None:
        """Let the gradients of a parameter wait, ``(environments, *shape)``."""
        self._waiting[index] = gradients.reshape(len(gradients), self._layout.shapes[index].numel())
        self._bytes += gradients.nbytes

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting, self._bytes = {}, 0

    def pop(self) -> tuple[list[int], Tensor]:
        """The parameters whose gradients wait, in their order, and ``(environments, components)``."""
        waiting = sorted(self._waiting.items())
        self.clear()
        indices, gradients = [index for index, _ in waiting], [each for _, each in waiting]
        return indices, gradients[0] if len(gradients) == 1 else torch.cat(gradients, 1)

    def __bool__(self) -> bool:
        return len(self._waiting) > 0
