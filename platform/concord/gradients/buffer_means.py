"""Buffers, such as the running statistics of batch norm, after the passes of several environments."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class BufferMeans:
    """The mean over environments of the buffers after each one's pass.

    Buffers that no environment changed do not change: the mean of equal numbers is rounded, so tables, frozen
    statistics and large counts would drift.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[str, Tensor] = {}
        self._changed: dict[str, Tensor] = {}

    def add(self, new: dict[str, Tensor]) -> None:
        """Add the environments' buffers, each ``(environments, *buffer.shape)``."""
        old = dict(self._model.named_buffers()) if new else {}
        for name, values in new.items():
            total, changed = values.sum(0), (values != old[name]).any(0)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._changed[name] = self._changed[name] | changed if name in self._changed else changed

    def over(self, environments: int) -> dict[str, Tensor]:
        """The buffers' new values; integers stay integers."""
        old = dict(self._model.named_buffers()) if self._sums else {}
        new = {}
        for name, total in self._sums.items():
            whole = not (total.is_floating_point() or total.is_complex())
            mean = total // environments if whole else total / environments
            new[name] = torch.where(self._changed[name], mean.to(old[name].dtype), old[name])
        return new


def replace_buffers(model: nn.Module, new: Mapping[str, Tensor]) -> None:
    """Copy new values into a model's buffers, those of one dtype together."""
    for dtype in {value.dtype for value in new.values()}:
        of_dtype = {name: value for name, value in new.items() if value.dtype == dtype}
        torch._foreach_copy_([model.get_buffer(name) for name in of_dtype], list(of_dtype.values()))
