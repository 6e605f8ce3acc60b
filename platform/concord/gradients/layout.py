"""The places of the trainable parameters in one flat run of components."""

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation.rule import accumulation_dtype
from concord.aggregation.strides import match_strides
from concord.errors import InputError


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a model, one after the other.

    Attributes:
        names: names of the parameters, in the order of ``named_parameters()``.
        shapes: their shapes.
        offsets: the beginning of each parameter, and last the number of components.
        dtype: the dtype in which their gradients are summed.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(parameters: Mapping[str, Tensor]) -> "Layout":
        """The layout of these parameters, in this order (InputError for one that is complex, or has no values)."""
        require_real_values(parameters)
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
        """The number of all components."""
        return self.offsets[-1]

    @functools.cached_property
    def layers(self) -> "Layers":
        """The parameters as layers of one run."""
        return Layers(tuple(shape.numel() for shape in self.shapes), self.offsets[:-1])

    def part(self, flat: Tensor, index: int) -> Tensor:
        """The view of parameter ``index`` in ``flat``, shaped as the parameter."""
        return flat[self.offsets[index] : self.offsets[index + 1]].view(self.shapes[index])


@dataclass(frozen=True)
class Layers:
    """Layers (parameter tensors) that lie one after the other in a flat run of components.

    ``sizes`` are their numbers of components, ``numbers`` the number of each first component in the model.
    """

    sizes: tuple[int, ...]
    numbers: tuple[int, ...]

    @functools.cached_property
    def slices(self) -> list[slice]:
        """The slice of each layer in the run."""
        edges = itertools.accumulate(self.sizes, initial=0)
        return [slice(start, end) for start, end in itertools.pairwise(edges)]

    def within(self, part: slice) -> list[tuple[int, slice]]:
        """The layers that overlap this part of the run, and their slices in the part."""
        found = []
        for index, layer in enumerate(self.slices):
            start, end = max(layer.start, part.start), min(layer.stop, part.stop)
            if start < end:
                found.append((index, slice(start - part.start, end - part.start)))
        return found

    def components(self, part: slice, device: torch.device) -> Tensor:
        """The numbers of the components in this part of the run, int64."""
        pieces = []
        for index, piece in self.within(part):
            first = self.numbers[index] + part.start + piece.start - self.slices[index].start
            pieces.append(torch.arange(first, first + piece.stop - piece.start, device=device))
        return torch.cat(pieces)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def require_real_values(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters that are complex, or on the device ``meta`` (InputError, which names one)."""
    for name, parameter in parameters.items():
        if parameter.is_complex():
            right = "keep its real and imaginary parts as a real parameter, torch.view_as_real"
            raise InputError(f"parameter {name}: is complex ({parameter.dtype}), and gradients must be real; {right}")
        if parameter.is_meta:
            right = "call model.to_empty(device=…) and initialize it before"
            raise InputError(f"parameter {name}: is on the device meta, without values; {right}")


def require_unwrapped(model: nn.Module) -> None:
    """Refuse a model that exchanges gradients in its backward pass, which does not run here (InputError)."""
    if isinstance(model, DistributedDataParallel):
        raise InputError(
            "model: is wrapped in DistributedDataParallel, whose exchange would not run; give model.module and a "
            "group, or call register_aggregation_hook(model, rule)"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which a sharded model has imported, in a second
    if fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in model.modules()):
        raise InputError("model: is sharded by fully_shard; call register_aggregation(model, rule) in place of this")


def require_unchanged(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a model whose trainable parameters are no longer ``parameters`` (InputError, which names one).

    A parameter that is frozen, unfrozen or exchanged later would be trained wrongly or not at all, without an error.
    """
    now = trainable(model)
    if len(now) == len(parameters) and all(now.get(name) is parameter for name, parameter in parameters.items()):
        return
    for name, parameter in model.named_parameters():
        known = parameters.get(name)
        if known is parameter and not parameter.requires_grad:
            _refuse(name, "was frozen")
        if known is None and parameter.requires_grad:
            _refuse(name, "was unfrozen or added")
        if known is not None and known is not parameter:
            _refuse(name, "is another one (load_state_dict with assign=True does that)")
    _refuse(next(iter(parameters.keys() - now.keys())), "is gone")


def require_no_hooks_after_accumulation(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters with a hook that would not run on the aggregated gradient (InputError)."""
    for name, parameter in parameters.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f"parameter {name}: its post-accumulate-grad hook cannot run, since the aggregated gradient is put "
                "there by no backward pass; remove the hook, and do its work after the gradients were aggregated"
            )


def _refuse(name: str, what: str) -> None:
    raise InputError(
        f"parameter {name}: it {what} since its gradients were set up; set them up anew after such a change"
    )


def store_gradients(parameters: Sequence[nn.Parameter], layout: Layout, flat: Tensor) -> None:
    """Store the parts of ``flat`` in the parameters' ``grad``, as views if dtype and strides allow it."""
    parts = flat.split([shape.numel() for shape in layout.shapes])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = match_strides(part.view(parameter.shape).to(parameter.dtype), parameter)
