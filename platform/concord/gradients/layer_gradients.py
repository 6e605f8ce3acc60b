"""The gradients of each kind of layer by group of examples, from its input and the gradient of its output.

A layer of a kind that is not in :data:`LAYERS` is computed the general way: its output is computed again for each group
and differentiated, by ``vmap`` of a vector-Jacobian product, or one group after the other if vmap does not support it.

"The gradient of a group" is the gradient through the activations of its examples. For layers that treat examples
separately it is the derivative of the group's loss; behind batch norm's shared statistics it is not, see
:class:`~concord.gradients.per_example.PerExample`.
"""

import collections
import copy
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from concord.errors import InputError, first_line
from concord.gradients.compiled import Compiled
from concord.gradients.example_tracing import Spread, spread_out
from concord.gradients.group_gradients import (
    Convolution,
    Geometry,
    GroupGradients,
    Product,
    Recomputed,
    RowGradients,
    StoredGradients,
)

Forms = dict[str, GroupGradients]
Formula = Callable[[Any, Tensor, Tensor], Forms | None]
"""Maps a module, its input and the gradient of its output, which begin with ``(groups, examples)``, to forms of all its
parameters; None where this call of the layer has to go the general way."""


def linear(module: nn.Linear, inputs: Tensor, grad: Tensor) -> Forms:
    """Outer products, summed over the vectors of a group."""
    rows = grad.reshape(len(grad), -1, grad.shape[-1])
    columns = inputs.to(grad.dtype).reshape(len(grad), -1, inputs.shape[-1])
    return {"weight": Product(rows.transpose(1, 2), columns)} | _bias(module, rows, (1,))


def transposed_linear(_: nn.Module, inputs: Tensor, grad: Tensor) -> Forms:
    """As a linear layer's, for a weight ``(in, out)``."""
    rows = inputs.to(grad.dtype).reshape(len(grad), -1, inputs.shape[-1])
    columns = grad.reshape(len(grad), -1, grad.shape[-1])
    return {"weight": Product(rows.transpose(1, 2), columns), "bias": _total(columns, (1,))}


def convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, grad: Tensor) -> Forms | None:
    """Products of the output's gradient with the kernel's patches of the input, over positions."""
    if inputs.ndim != len(module.kernel_size) + 3:
        return None
    inputs, geometry = inputs.to(grad.dtype), geometry_of(module)
    if geometry is None:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = functional.pad(inputs.flatten(0, 1), list(module._reversed_padding_repeated_twice), mode=mode)
        inputs = padded.unflatten(0, inputs.shape[:2])
        geometry = Geometry(module.stride, (0,) * len(module.kernel_size), module.dilation, module.groups)
    weight = Convolution(inputs, grad, tuple(module.weight.shape), geometry)
    return {"weight": weight} | _bias(module, grad, (1, *range(3, grad.ndim)))


def geometry_of(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Geometry | None:
    """The geometry of a convolution; None if its padding is not the same number of zeros on both sides."""
    edges = module._reversed_padding_repeated_twice
    if module.padding_mode != "zeros" or edges[::2] != edges[1::2]:
        return None
    return Geometry(module.stride, tuple(reversed(edges[::2])), module.dilation, module.groups)


def layer_norm(module: nn.LayerNorm, inputs: Tensor, grad: Tensor, compiled: bool = False) -> Forms:
    """The gradient times the normalized input, summed over the dimensions between the group and the normalized ones."""
    summed = tuple(range(1, grad.ndim - len(module.normalized_shape)))
    return _affine(compiled, [inputs, grad], _by_layer, summed, tuple(module.normalized_shape), module.eps)


def rms_norm(module: Any, inputs: Tensor, grad: Tensor, compiled: bool = False) -> Forms:
    """As layer norm's; in other libraries it normalizes the last dimension, and ε has another name."""
    shape = tuple(getattr(module, "normalized_shape", inputs.shape[-1:]))
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    summed = tuple(range(1, grad.ndim - len(shape)))
    return {"weight": _affine(compiled, [inputs, grad], functional.rms_norm, summed, shape, None, eps)["weight"]}


def group_norm(module: nn.GroupNorm, inputs: Tensor, grad: Tensor, compiled: bool = False) -> Forms:
    """As layer norm's, summed over examples and positions."""
    summed = (1, *range(3, grad.ndim))
    return _affine(compiled, [inputs, grad], _by_group, summed, module.num_groups, module.eps)


def batch_norm(module: nn.modules.batchnorm._BatchNorm, inputs: Tensor, grad: Tensor, compiled: bool = False) -> Forms:
    """As group norm's, with the batch's statistics, or the running ones if those were used."""
    summed = (1, *range(3, grad.ndim))
    if module.training or module.running_mean is None or module.running_var is None:
        return _affine(compiled, [inputs, grad], _by_batch, summed, module.eps)
    running = [module.running_mean, module.running_var]
    return _affine(compiled, [inputs, grad, *running], _by_running, summed, module.eps)


def embedding(module: nn.Embedding, inputs: Tensor, grad: Tensor) -> Forms | None:
    """The rows of a group's own tokens."""
    if module.sparse or module.scale_grad_by_freq:
        raise InputError("an embedding with sparse or scale_grad_by_freq has no per-example gradients; set it to False")
    if module.max_norm is not None:
        return None
    places = inputs.reshape(len(inputs), -1)
    gradients = grad.reshape(*places.shape, grad.shape[-1])
    return {"weight": RowGradients(places, gradients, module.num_embeddings, module.padding_idx)}


def _bias(module: nn.Module, grad: Tensor, summed: tuple[int, ...]) -> Forms:
    return {} if module.bias is None else {"bias": _total(grad, summed)}


def _by_layer(inputs: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
    return functional.layer_norm(inputs, shape, eps=eps)


def _by_group(inputs: Tensor, groups: int, eps: float) -> Tensor:
    return functional.group_norm(inputs.flatten(0, 1), groups, eps=eps).view_as(inputs)


def _by_batch(inputs: Tensor, eps: float) -> Tensor:
    return functional.batch_norm(inputs.flatten(0, 1), None, None, training=True, eps=eps).view_as(inputs)


def _by_running(inputs: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    return functional.batch_norm(inputs.flatten(0, 1), mean, variance, eps=eps).view_as(inputs)


def _affine_sums(
    tensors: Sequence[Tensor], normalize: Callable[..., Tensor], summed: tuple[int, ...], *settings: Hashable
) -> tuple[Tensor, Tensor]:
    """The gradients of a norm's weight and bias, summed over these dimensions.

    ``tensors`` are the input, the gradient of the output, and what ``normalize`` takes beside the input.
    """
    inputs, grad, *running = tensors
    normalized = normalize(inputs.to(grad.dtype), *running, *settings)
    return _summed(grad * normalized, summed), _summed(grad, summed)


@functools.cache
def _compiled(normalize: Callable[..., Tensor]) -> Compiled:
    """These sums, in one pass for the layers of all sizes; ``normalize`` only keeps the kinds of norms apart."""
    del normalize
    return Compiled(_affine_sums, "the gradients of norms")


def _affine(
    compiled: bool,
    tensors: Sequence[Tensor],
    normalize: Callable[..., Tensor],
    summed: tuple[int, ...],
    *settings: Hashable,
) -> Forms:
    sums = _compiled(normalize) if compiled else _affine_sums
    weight, bias = sums(tensors, normalize, summed, *settings)
    return {"weight": StoredGradients(weight), "bias": StoredGradients(bias)}


def _total(values: Tensor, summed: tuple[int, ...]) -> StoredGradients:
    return StoredGradients(_summed(values, summed))


def _summed(values: Tensor, summed: tuple[int, ...]) -> Tensor:
    """The sum over these dimensions; a dimension of length 1 costs no copy."""
    longer = [each for each in summed if values.shape[each] > 1]
    return (values.sum(longer, keepdim=True) if longer else values).squeeze(summed)


LAYERS: dict[type[nn.Module] | str, Formula] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.Embedding: embedding,
    "transformers.pytorch_utils.Conv1D": transposed_linear,
    **{
        f"transformers.models.{model.lower()}.modeling_{model.lower()}.{model}RMSNorm": rms_norm
        for model in ("Llama", "Mistral", "Qwen2", "Qwen3")
    },
}
"""The kinds of layers that have a formula; by name where they are another library's, which may not be installed.

Add to it for a layer of your own.
"""


_NORMS = (layer_norm, rms_norm, group_norm, batch_norm)  # the formulas that can be compiled


def formula_of(module: nn.Module) -> Formula | None:
    """The formula for a module's kind."""
    kind = type(module)
    return LAYERS.get(kind) or LAYERS.get(f"{kind.__module__}.{kind.__qualname__}")


def is_unit(module: nn.Module) -> bool:
    """Whether a module uses its children's parameters without calling the children, so that all are one layer."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) or parametrize.is_parametrized(module)


@dataclass(frozen=True)
class CapturedLayer:
    """A module that is captured as a whole, and its own trainable parameters, by name and by number."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    indices: dict[str, int]

    @property
    def has_formula(self) -> bool:
        """Whether a formula gives the gradients of all its parameters."""
        return formula_of(self.module) is not None and self.parameters.keys() <= {"weight", "bias"}


_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
_CONTAINERS = (list, dict, set, collections.deque)


class ModuleState:
    """What a module's forward may change, as it is now: buffers, and attributes of the module and of those inside it.

    Spectral norm, for example, improves its estimate of the singular vectors at each forward pass in training.
    """

    def __init__(self, module: nn.Module) -> None:
        self.buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._attributes = [(each, _copied(_attributes(each))) for each in module.modules()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the modules these attributes while the body runs; the caller passes the buffers on."""
        after = [(module, _attributes(module)) for module, _ in self._attributes]
        try:
            for module, values in self._attributes:
                _set_attributes(module, _copied(values))
            yield
        finally:
            for module, values in after:
                _set_attributes(module, values)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def _set_attributes(module: nn.Module, values: dict[str, Any]) -> None:
    own = vars(module)
    for name in _attributes(module).keys() - values.keys():
        del own[name]
    own.update(values)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes, with tensors and containers that a forward pass may write to copied."""
    found = {}
    for name, value in attributes.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            value = value.detach().clone()
        found[name] = copy.copy(value) if isinstance(value, _CONTAINERS) else value
    return found


@dataclass
class Call:
    """One call of a layer.

    Attributes:
        spreads: how its outputs were spread.
        state: of the module before the call; None if a formula needs none.
    """

    layer: CapturedLayer
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    spreads: Sequence[Spread | None]
    state: ModuleState | None = None

    def __post_init__(self) -> None:
        self.versions = self._versions()
        device = next(iter(self.layer.parameters.values())).device.type
        self.autocast = torch.autocast(
            device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)
        )

    def _versions(self) -> list[int]:
        # Most layers get one tensor; a tree takes 10 µs longer.
        single = len(self.arguments) == 1 and isinstance(self.arguments[0], Tensor) and not self.keywords
        leaves = self.arguments if single else pytree.tree_leaves((self.arguments, self.keywords))
        return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]

    def _output_dimension(self, index: int) -> int:
        """The dimension of the examples in the output of this number."""
        if index > 0 and isinstance(self.layer.module, nn.MultiheadAttention):  # the attention weights
            return 0
        return self._dimension(index)

    def _dimension(self, index: int) -> int:
        """The dimension of the examples in the input of this number."""
        if index == 0 or (index < 3 and isinstance(self.layer.module, nn.MultiheadAttention)):
            return 0 if getattr(self.layer.module, "batch_first", True) else 1
        return 1 if isinstance(self.layer.module, nn.RNNBase) else 0  # a state of layers, examples, units

    @property
    def _shared(self) -> Tensor | None:
        """An argument that all examples share, though it may have as many rows as there are examples."""
        if not isinstance(self.layer.module, nn.MultiheadAttention):
            return None
        mask = self.keywords.get("attn_mask", self.arguments[5] if len(self.arguments) > 5 else None)
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def gradients(
        self,
        grads: Sequence[Tensor | None],
        examples: int,
        groups: int,
        *,
        alternate: bool = False,
        compiled: bool = False,
    ) -> tuple[Forms, bool]:
        """The gradients of the layer's parameters by name, for groups of examples, all of one size.

        The examples of a group are neighbours, or they ``alternate`` with those of the other groups. ``grads`` are the
        gradients of the output tensors. With ``compiled`` the sums of norms are computed by ``torch.compile``. Also
        returns whether the general way was used.
        """
        name, module = self.layer.name, self.layer.module
        if self._versions() != self.versions:
            raise InputError(
                f"module {name}: its input was written to in place after it was used; "
                "per-example gradients need it as it was"
            )
        for index, grad in enumerate(grads):
            at = self._output_dimension(index)
            if grad is not None and (grad.ndim <= at or grad.shape[at] != examples):
                raise InputError(
                    f"module {name}: its output has shape {tuple(grad.shape)}, but the batch has {examples} "
                    f"examples: dimension {at} has to be the examples. Apply it to each example (expand its input to "
                    "the batch), or freeze it (requires_grad_(False))"
                )
        formula, first = formula_of(module), grads[0]
        if formula and first is not None and len(self.arguments) == 1 and not self.keywords:
            inputs = self.arguments[0].detach()
            if self.spreads[0] is not None:
                inputs = spread_out(inputs, self.spreads[0], examples)
            size = (examples // groups, groups) if alternate else (groups, examples // groups)
            inputs, first = (each.reshape(*size, *each.shape[1:]) for each in (inputs, first))
            norm = next((each for each in _NORMS if each is formula), None)
            if compiled and norm is not None:
                formula = functools.partial(norm, compiled=True)
            forms = formula(module, *(each.transpose(0, 1) if alternate else each for each in (inputs, first)))
            if forms is not None and forms.keys() >= self.layer.parameters.keys():
                return {name: forms[name] for name in self.layer.parameters}, False
        return self._recomputed(grads, examples, groups), True

    def _recomputed(self, grads: Sequence[Tensor | None], examples: int, groups: int) -> Forms:
        leaves, structure = pytree.tree_flatten((self.arguments, self.keywords))
        inputs: list[Any] = []
        mapped: list[int | None] = []
        shared = self._shared
        for index, leaf in enumerate(leaves):
            at, value = self._dimension(index), leaf.detach() if isinstance(leaf, Tensor) else leaf
            is_batch = isinstance(leaf, Tensor) and leaf is not shared and leaf.ndim > at and leaf.shape[at] == examples
            inputs.append(value.unflatten(at, (groups, -1)) if is_batch else value)
            mapped.append(at if is_batch else None)
        arrived = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
        places = [self._output_dimension(index) for index, _ in arrived]
        cotangents = [grad.unflatten(at, (groups, -1)) for (_, grad), at in zip(arrived, places, strict=True)]
        for at, (index, _) in enumerate(arrived):
            if spread := self.spreads[index]:  # the module computes it once for all examples
                cotangents[at] = cotangents[at].sum(1, keepdim=spread == "expanded")
        module = self.layer.module
        state = ModuleState(module) if self.state is None else self.state

        def of_one(values: dict[str, Tensor], cotangents: list[Tensor], inputs: list[Any]) -> dict[str, Tensor]:
            def outputs(parameters: dict[str, Tensor]) -> list[Tensor]:
                arguments, keywords = pytree.tree_unflatten(inputs, structure)
                # Each group begins with the state that the batch began with; the forward pass may write to a buffer.
                buffers = {name: buffer.clone() for name, buffer in state.buffers.items()}
                with state.restored():
                    results = functional_call(module, {**buffers, **parameters}, arguments, keywords)
                tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
                return [tensors[index].to(given.dtype) for (index, _), given in zip(arrived, cotangents, strict=True)]

            result: dict[str, Tensor] = vjp(outputs, values)[1](cotangents)[0]
            return result

        values = {name: parameter.detach() for name, parameter in self.layer.parameters.items()}
        last: tuple[slice | None, dict[str, Tensor]] = (None, {})

        def of_some(part: slice) -> dict[str, Tensor]:
            nonlocal last
            if last[0] != part:  # else another parameter of the layer has asked already
                count = part.stop - part.start
                given = [grad.narrow(at, part.start, count) for grad, at in zip(cotangents, places, strict=True)]
                taken = [
                    leaf if at is None else leaf.narrow(at, part.start, count)
                    for leaf, at in zip(inputs, mapped, strict=True)
                ]
                # vmap warns where it is slow, which cannot be changed here. oneDNN's LSTM cannot be differentiated so.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        with torch.backends.mkldnn.flags(enabled=False), self.autocast:
                            last = (part, _of_each(of_one, values, given, places, taken, mapped))
                    except Exception as error:
                        raise InputError(
                            f"module {self.layer.name} ({type(module).__name__}): it cannot be differentiated for one "
                            f"example alone ({first_line(error)}). Freeze it (requires_grad_(False)), "
                            "or add its kind to concord.gradients.layer_gradients.LAYERS"
                        ) from error
            return last[1]

        size = sum(parameter.nbytes for parameter in values.values())
        return {name: Recomputed(groups, of_some, name, size) for name in values}


def _of_each(
    of_one: Callable[..., dict[str, Tensor]],
    values: dict[str, Tensor],
    cotangents: list[Tensor],
    places: list[int],
    inputs: list[Any],
    mapped: list[int | None],
) -> dict[str, Tensor]:
    """The function's results for every group, stacked; by vmap, or one after the other."""
    try:
        results: dict[str, Tensor] = vmap(of_one, in_dims=(None, places, mapped))(values, cotangents, inputs)
        return results
    except Exception:  # vmap cannot take the module; a mistake of the module's own is raised again
        each = [
            of_one(
                values,
                [grad.select(at, group) for grad, at in zip(cotangents, places, strict=True)],
                [leaf if at is None else leaf.select(at, group) for leaf, at in zip(inputs, mapped, strict=True)],
            )
            for group in range(cotangents[0].shape[places[0]])
        ]
        return {name: torch.stack([one[name] for one in each]) for name in values}
