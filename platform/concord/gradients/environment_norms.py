"""Batch norm of each environment by itself, where environments go through the model as one batch.

The environments' examples alternate: all first examples, all second ones. So the channels of an example's environments
are neighbours in memory, and one call normalizes environments × channels without a copy; its backward pass gives
the gradients of weight and bias of every environment. All modules' numbers are spread and averaged together, which on
a GPU takes few operations.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from concord.errors import InputError
from concord.gradients.layer_gradients import CapturedLayer
from concord.gradients.pieces import normalizes_over_the_batch

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATISTICS = ("running_mean", "running_var")


class EnvironmentNorms:
    """The batch norms of a model.

    Args:
        model: the model.
        layers: its layers with trainable parameters.

    Attributes:
        names: the names of their buffers.

    Raises:
        InputError: a batch norm is of another kind, averages over all steps, or shares a parameter.
    """

    def __init__(self, model: nn.Module, layers: Sequence[CapturedLayer]) -> None:
        self._modules = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
        for name, module in self._modules.items():
            if type(module) not in _KINDS or module.momentum is None or "forward" in vars(module):
                raise InputError(f"pooled: module {name} is no batch norm that is known")
        indices = [index for layer in layers for index in layer.indices.values()]
        if self._modules and len(set(indices)) < len(indices):
            raise InputError("pooled: modules share a parameter")
        self.names = {
            f"{name}.{buffer}".lstrip(".")
            for name, module in self._modules.items()
            for buffer, _ in module.named_buffers()
        }
        self._active = len(self._modules) > 0
        self._layers = {id(layer.module): layer for layer in layers}
        self._leaves: dict[int, dict[str, Tensor]] = {}  # of the present pass, by module
        self._means: list[tuple[Tensor, int]] = []  # of the buffers after each pass, and its number of environments
        self._sizes: dict[str, int] = {}
        self._called: set[str] = set()  # the buffers of the modules that were called
        self._counts: list[str] = []

    def begin(self) -> None:
        """Begin a step."""
        self._means, self._counts = [], []

    @contextlib.contextmanager
    def separated(self, environments: int, examples: int) -> Iterator[None]:
        """Normalize by environment while the body runs: a pass of examples that alternate between environments."""
        active = {name: each for name, each in self._modules.items() if normalizes_over_the_batch(each)}
        follows = {name: each for name, each in active.items() if each.running_mean is not None and each.momentum != 0}
        kept = (buffer for each in follows.values() for buffer in (each.running_mean, each.running_var))
        before = [buffer for buffer in kept if buffer is not None]
        affine = [value for each in active.values() for value in _affine(each).values()]
        spread = _spread([*before, *affine], environments)
        after, affine = spread[: len(before)], spread[len(before) :]
        statistics = dict(zip(follows, zip(after[::2], after[1::2], strict=True), strict=True))
        self._leaves, rest = {}, iter(affine)
        for name, module in active.items():
            trained = self._layers[id(module)].parameters if id(module) in self._layers else {}
            leaves = {part: next(rest).requires_grad_(part in trained) for part in _affine(module)}
            forward = self._forward((examples, environments), leaves, statistics.get(name, (None, None)))
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module in active.values():
                del module.forward
        if before:
            self._means.append((_mean(after, environments), environments))
            names = [f"{name}.{part}".lstrip(".") for name in follows for part in _STATISTICS]
            self._sizes = {name: len(value) for name, value in zip(names, before, strict=True)}
        called = {name: each for name, each in active.items() if id(each) in self._leaves}
        self._called = {f"{name}.{part}".lstrip(".") for name in called for part in _STATISTICS}
        counting = [name for name, each in called.items() if each.num_batches_tracked is not None]
        self._counts = [f"{name}.num_batches_tracked".lstrip(".") for name in counting]

    def _forward(
        self, size: tuple[int, int], leaves: dict[str, Tensor], statistics: tuple[Tensor | None, Tensor | None]
    ) -> Any:
        def forward(module: Any, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name for it
            if id(module) in self._leaves or len(input) != math.prod(size):
                raise InputError("pooled: a batch norm is called twice, or with something other than the examples")
            self._leaves[id(module)] = leaves
            together = input.unflatten(0, size).flatten(1, 2)
            weight, bias = leaves.get("weight"), leaves.get("bias")
            momentum, eps = module.momentum, module.eps
            result = functional.batch_norm(together, *statistics, weight, bias, True, momentum, eps)
            apart: Tensor = result.unflatten(1, (size[1], -1)).flatten(0, 1)
            return apart

        return forward

    def handles(self, module: nn.Module) -> bool:
        """Whether this module normalizes by environment here, and its gradients are among :meth:`leaves`."""
        return self._active and normalizes_over_the_batch(module)

    def leaves(self) -> Iterator[tuple[CapturedLayer, dict[str, Tensor]]]:
        """The layers that were called, and tensors whose gradients are those of all environments, side by side."""
        for module, leaves in self._leaves.items():
            if module in self._layers:
                yield self._layers[module], {name: leaves[name] for name in self._layers[module].parameters}

    def buffers(self, model: nn.Module, environments: int) -> Mapping[str, Tensor]:
        """The buffers after a step of this number of environments: the mean over each one's own."""
        found: dict[str, Tensor] = {}
        if self._counts:
            counts = torch._foreach_add([model.get_buffer(name) for name in self._counts], 1)
            found |= zip(self._counts, counts, strict=True)
        if self._means:
            whole = self._means[0][0]
            if len(self._means) > 1:
                whole = torch.stack([mean * (count / environments) for mean, count in self._means]).sum(0)
            means = zip(self._sizes, whole.split(list(self._sizes.values())), strict=True)
            found |= {name: mean for name, mean in means if name in self._called}
        return found


def _affine(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module._parameters.items() if value is not None}


def _spread(values: Sequence[Tensor], environments: int) -> list[Tensor]:
    """Each of these vectors as many times as there are environments, one after the other: ``(environments · c,)``."""
    if not values:
        return []
    sizes = tuple(map(len, values))
    places = _places(sizes, environments, values[0].device)
    # .data: of one memory, but each with a count of changes of its own, since statistics are written to.
    return [
        part.data
        for part in torch.cat([each.detach() for each in values])[places].split([environments * each for each in sizes])
    ]


def _mean(spread: Sequence[Tensor], environments: int) -> Tensor:
    """The mean over environments of the first vectors that :func:`_spread` has spread, one after the other."""
    sizes = tuple(len(each) // environments for each in spread)
    whole = spread[0].as_strided((environments * sum(sizes),), (1,), 0)
    return whole[_rows(sizes, environments, whole.device)].mean(0)


@functools.lru_cache(maxsize=32)
def _places(sizes: tuple[int, ...], environments: int, device: torch.device) -> Tensor:
    """Of each number that is spread, its place in the vectors one after the other."""
    places = torch.arange(sum(sizes), device="cpu").split(sizes)
    return torch.cat([each.repeat(environments) for each in places]).to(device)


@functools.lru_cache(maxsize=32)
def _rows(sizes: tuple[int, ...], environments: int, device: torch.device) -> Tensor:
    """The places of each environment's numbers among those that are spread, ``(environments, numbers)``."""
    parts = torch.arange(environments * sum(sizes), device="cpu").split([environments * each for each in sizes])
    return torch.cat([each.view(environments, -1) for each in parts], 1).to(device)
