"""What each kind of layer knows of its per-example gradients, from its input and the gradient of its output.

A layer of a kind that is not known here goes the general way: its output is computed again for each example, and
differentiated (``vmap`` of a vector-Jacobian product; one example after the other where vmap cannot take it).

"The gradient of an example" is what flows through that example's activations. For layers that treat examples
separately that is the derivative of the example's loss; behind batch norm's shared statistics it is not, see
:class:`~concord.gradients.per_example.PerExample`.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from concord.errors import InputError
from concord.gradients.example_gradients import (
    Convolution,
    ExampleGradients,
    Product,
    Recomputed,
    RowGradients,
    StoredGradients,
)
from concord.gradients.example_tracing import Spread

Forms = dict[str, ExampleGradients]
Layer = Callable[[Any, Tensor, Tensor], Forms | None]
"""Maps a module, its input and the gradient of its output to forms of all its parameters; None where this call
of the layer has to go the general way."""


def linear(_: nn.Linear, inputs: Tensor, grad: Tensor) -> Forms:
    """Outer products; of several vectors an example, their sum."""
    rows = grad.reshape(len(grad), -1, grad.shape[-1]).transpose(1, 2)
    columns = inputs.to(grad.dtype).reshape(len(grad), -1, inputs.shape[-1])
    return {
        "weight": Product(rows, columns),
        "bias": StoredGradients(grad.flatten(1, -2).sum(1) if grad.ndim > 2 else grad),
    }


def convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, grad: Tensor) -> Forms | None:
    """Products of the output's gradient with the patches that the kernel saw, over positions."""
    padding = symmetric_padding(module)
    if inputs.ndim != len(module.kernel_size) + 2:
        return None
    inputs = inputs.to(grad.dtype)
    if padding is None:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = functional.pad(inputs, list(module._reversed_padding_repeated_twice), mode=mode)
        padding = (0,) * len(module.kernel_size)
    shape = tuple(module.weight.shape)
    return {
        "weight": Convolution(inputs, grad, shape, module.stride, padding, module.dilation, module.groups),
        "bias": StoredGradients(grad.flatten(2).sum(2)),
    }


def symmetric_padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...] | None:
    """How many zeros a convolution puts before and behind each dimension; None if it pads in another way."""
    edges = module._reversed_padding_repeated_twice
    if module.padding_mode != "zeros" or edges[::2] != edges[1::2]:
        return None
    return tuple(reversed(edges[::2]))


def layer_norm(module: nn.LayerNorm, inputs: Tensor, grad: Tensor) -> Forms:
    """The gradient times what was normalized, summed over whatever lies between the example and the normalized."""
    normalized = functional.layer_norm(inputs.to(grad.dtype), module.normalized_shape, eps=module.eps)
    between = tuple(range(1, grad.ndim - len(module.normalized_shape)))
    return _affine(grad, normalized, between)


def rms_norm(module: Any, inputs: Tensor, grad: Tensor) -> Forms:
    """As layer norm's; other libraries' normalize the last dimension, and call ε otherwise."""
    shape = list(getattr(module, "normalized_shape", inputs.shape[-1:]))
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    normalized = functional.rms_norm(inputs.to(grad.dtype), shape, eps=eps)
    return {"weight": _affine(grad, normalized, tuple(range(1, grad.ndim - len(shape))))["weight"]}


def group_norm(module: nn.GroupNorm, inputs: Tensor, grad: Tensor) -> Forms:
    """As layer norm's, summed over positions."""
    normalized = functional.group_norm(inputs.to(grad.dtype), module.num_groups, eps=module.eps)
    return _affine(grad, normalized, tuple(range(2, grad.ndim)))


def batch_norm(module: nn.modules.batchnorm._BatchNorm, inputs: Tensor, grad: Tensor) -> Forms:
    """As layer norm's, with the batch's statistics, or the running ones if those were used."""
    own = module.training or module.running_mean is None
    normalized = functional.batch_norm(
        inputs.to(grad.dtype),
        None if own else module.running_mean,
        None if own else module.running_var,
        training=own,
        eps=module.eps,
    )
    return _affine(grad, normalized, tuple(range(2, grad.ndim)))


def embedding(module: nn.Embedding, inputs: Tensor, grad: Tensor) -> Forms | None:
    """The rows of an example's own tokens."""
    if module.sparse or module.scale_grad_by_freq:
        raise InputError("an embedding with sparse or scale_grad_by_freq has no per-example gradients; set it to False")
    if module.max_norm is not None or inputs.ndim == 0:
        return None
    places = inputs.reshape(len(inputs), -1)
    gradients = grad.reshape(*places.shape, grad.shape[-1])
    return {"weight": RowGradients(places, gradients, module.num_embeddings, module.padding_idx)}


def _affine(grad: Tensor, normalized: Tensor, summed: tuple[int, ...]) -> Forms:
    weight, bias = grad * normalized, grad
    return {
        "weight": StoredGradients(weight.sum(summed) if summed else weight),
        "bias": StoredGradients(bias.sum(summed) if summed else bias),
    }


def transposed_linear(_: nn.Module, inputs: Tensor, grad: Tensor) -> Forms:
    """As a linear layer's, for a weight ``(in, out)``."""
    rows = inputs.to(grad.dtype).reshape(len(grad), -1, inputs.shape[-1]).transpose(1, 2)
    columns = grad.reshape(len(grad), -1, grad.shape[-1])
    return {"weight": Product(rows, columns), "bias": StoredGradients(columns.sum(1))}


LAYERS: dict[type[nn.Module] | str, Layer] = {
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
"""The kinds of layers that are known, or their names where another library has them, which need not be there.

Add to it for one of your own; what is not in it goes the general way.
"""


def known(module: nn.Module) -> Layer | None:
    """What is known of a module's kind."""
    kind = type(module)
    return LAYERS.get(kind) or LAYERS.get(f"{kind.__module__}.{kind.__qualname__}")


def spread_out(tensor: Tensor, spread: Spread, examples: int) -> Tensor:
    """A view that begins with so many examples."""
    return tensor.expand(examples, *(tensor.shape if spread == "added" else tensor.shape[1:]))


def is_unit(module: nn.Module) -> bool:
    """Whether a module uses its children's parameters without calling them, so that it is one layer with them."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) or parametrize.is_parametrized(module)


@dataclass
class Call:
    """One call of a layer: what went in, how often that had been written to by then, and how outputs were spread."""

    module: nn.Module
    name: str
    parameters: dict[str, nn.Parameter]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    spreads: Sequence[Spread | None]

    def __post_init__(self) -> None:
        self.versions = [tensor._version for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        leaves = pytree.tree_leaves((self.arguments, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _output_dimension(self, index: int) -> int:
        """The dimension of the examples in the output of this number."""
        if index > 0 and isinstance(self.module, nn.MultiheadAttention):  # the attention weights
            return 0
        return self._dimension(index)

    def _dimension(self, index: int) -> int:
        """The dimension of the examples in the input of this number."""
        if index == 0 or (index < 3 and isinstance(self.module, nn.MultiheadAttention)):
            return 0 if getattr(self.module, "batch_first", True) else 1
        return 1 if isinstance(self.module, nn.RNNBase) else 0  # a state of layers, examples, units

    def gradients(self, grads: Sequence[Tensor | None], examples: int) -> tuple[Forms, bool]:
        """The per-example gradients of the layer's parameters.

        Args:
            grads: of the tensors among the outputs.
            examples: how many examples the batch has.

        Returns:
            The forms by the parameters' names in the layer, and whether they were obtained the general way.

        Raises:
            InputError: the layer is not applied to each example.
        """
        if [tensor._version for tensor in self._tensors()] != self.versions:
            raise InputError(
                f"module {self.name}: its input was written to in place after it was used; "
                "per-example gradients need it as it was"
            )
        for index, grad in enumerate(grads):
            at = self._output_dimension(index)
            if grad is not None and (grad.ndim <= at or grad.shape[at] != examples):
                raise InputError(
                    f"module {self.name}: its output has shape {tuple(grad.shape)}, but the batch has {examples} "
                    f"examples: dimension {at} has to be the examples. Apply it to each example (expand its input to "
                    "the batch), or freeze it (requires_grad_(False))"
                )
        layer = known(self.module)
        first = grads[0]
        if layer and first is not None and len(self.arguments) == 1 and not self.keywords:
            inputs = self.arguments[0].detach()
            if self.spreads[0] is not None:
                inputs = spread_out(inputs, self.spreads[0], examples)
            forms = layer(self.module, inputs, first)
            if forms is not None and forms.keys() >= self.parameters.keys():
                return {name: forms[name] for name in self.parameters}, False
        return self._recomputed(grads, examples), True

    @staticmethod
    def _of_examples(
        of_one: Callable[..., dict[str, Tensor]],
        values: dict[str, Tensor],
        cotangents: list[Tensor],
        inputs: list[Any],
        at: list[int],
        mapped: list[int | None],
    ) -> dict[str, Tensor]:
        """The function's results for every example, stacked; by vmap, or one after the other."""
        try:
            results: dict[str, Tensor] = vmap(of_one, in_dims=(None, at, mapped))(values, cotangents, inputs)
            return results
        except Exception:  # whatever the module does that vmap cannot; a mistake of its own is raised again
            each = [
                of_one(
                    values,
                    [grad.select(dimension, example) for grad, dimension in zip(cotangents, at, strict=True)],
                    [
                        leaf if dimension is None else leaf.select(dimension, example)
                        for leaf, dimension in zip(inputs, mapped, strict=True)
                    ],
                )
                for example in range(cotangents[0].shape[at[0]])
            ]
            return {name: torch.stack([one[name] for one in each]) for name in values}

    def finite(self, grads: Sequence[Tensor | None], examples: int) -> Tensor:
        """Which examples' inputs and output gradients are finite, ``(examples,)`` bool on the CPU."""
        result = torch.ones(examples, dtype=torch.bool)
        tensors = [(leaf, self._dimension(index)) for index, leaf in enumerate(self._tensors())]
        tensors += [(grad, self._output_dimension(at)) for at, grad in enumerate(grads) if grad is not None]
        for tensor, at in tensors:
            if tensor.is_floating_point() and tensor.ndim > at and tensor.shape[at] == examples:
                result &= torch.isfinite(tensor).movedim(at, 0).flatten(1).all(1).cpu()
        return result

    def _recomputed(self, grads: Sequence[Tensor | None], examples: int) -> Forms:
        leaves, structure = pytree.tree_flatten((self.arguments, self.keywords))
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        mapped: list[int | None] = []
        for index, leaf in enumerate(leaves):
            at = self._dimension(index)
            is_batch = isinstance(leaf, Tensor) and leaf.ndim > at and leaf.shape[at] == examples
            mapped.append(at if is_batch else None)
        wanted = [index for index, grad in enumerate(grads) if grad is not None]
        given = [(grad, self._output_dimension(index)) for index, grad in enumerate(grads) if grad is not None]
        added = [self.spreads[index] == "added" for index in wanted]
        buffers = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}

        def outputs(values: dict[str, Tensor], inputs: Sequence[Any]) -> list[Tensor]:
            batches = [
                leaf if dimension is None else leaf.unsqueeze(dimension)
                for leaf, dimension in zip(inputs, mapped, strict=True)
            ]
            arguments, keywords = pytree.tree_unflatten(batches, structure)
            results = functional_call(self.module, {**buffers, **values}, arguments, keywords)
            tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
            return [tensors[index] for index in wanted]

        def of_one(values: dict[str, Tensor], cotangents: list[Tensor], inputs: list[Any]) -> dict[str, Tensor]:
            pull = vjp(lambda parameters: outputs(parameters, inputs), values)[1]
            batches = [
                each if without else each.unsqueeze(at)
                for each, (_, at), without in zip(cotangents, given, added, strict=True)
            ]
            result: dict[str, Tensor] = pull(batches)[0]
            return result

        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        last: tuple[slice | None, dict[str, Tensor]] = (None, {})

        def of_some(part: slice) -> dict[str, Tensor]:
            nonlocal last
            if last[0] == part:  # another parameter of the layer has asked already
                return last[1]
            count = part.stop - part.start
            cotangents = [grad.narrow(at, part.start, count) for grad, at in given]
            inputs = [
                leaf if dimension is None else leaf.narrow(dimension, part.start, count)
                for leaf, dimension in zip(leaves, mapped, strict=True)
            ]
            # vmap says where it is slow, which nobody here can change. oneDNN's LSTM cannot be differentiated this way.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.backends.mkldnn.flags(enabled=False):
                    gradients = self._of_examples(of_one, values, cotangents, inputs, [at for _, at in given], mapped)
            last = (part, gradients)
            return gradients

        def make(name: str) -> Callable[[slice], Tensor]:
            def of_parameter(part: slice) -> Tensor:
                try:
                    return of_some(part)[name]
                except Exception as error:
                    raise InputError(
                        f"module {self.name} ({type(self.module).__name__}): it cannot be differentiated for one "
                        f"example alone ({str(error).strip().splitlines()[0]}). Freeze it (requires_grad_(False)), "
                        "or add its kind to concord.gradients.example_layers.LAYERS"
                    ) from error

            return of_parameter

        size = sum(parameter.nbytes for parameter in values.values())
        return {name: Recomputed(examples, make(name), size) for name in values}
