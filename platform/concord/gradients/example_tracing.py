"""Finds by a forward pass which outputs of layers belong to single examples, and which all examples share.

Shapes are ambiguous: a table of position embeddings ``(T, D)`` looks like a batch of T examples. So the first pass of
each form is followed operation by operation: tensors computed from the batch belong to its examples. A shared tensor
gets a dimension of examples (:data:`Spread`), so that a gradient arrives for each example. This is right if the model
adds the tensor to the batch, and wrong if the model takes its first row, for example; so the operations on it are also
checked.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from concord.errors import InputError

Spread = Literal["expanded", "added"]
"""How a shared output gets a dimension of examples: ``(1, ...)`` is expanded, any other has one put in front."""


def spread_out(tensor: Tensor, spread: Spread, examples: int) -> Tensor:
    """A view that begins with a dimension of examples."""
    return tensor.expand(examples, *(tensor.shape if spread == "added" else tensor.shape[1:]))


class ExampleTracing(TorchDispatchMode):
    """A mode that records which tensors are computed from the examples.

    Tensors are identified by their storage, so views and writes in place are also followed.

    Args:
        examples: the number of examples.
        inputs: the model's inputs. Inputs that begin with the examples belong to them, except the numbers 0, 1, 2, …
            beside inputs of that length, which are positions.
    """

    def __init__(self, examples: int, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._examples = examples
        # The weak references keep an address from being another storage's.
        self._own: dict[int, StorageWeakRef] = {}
        self._shared: dict[int, tuple[StorageWeakRef, str, Spread]] = {}
        # Of some own tensors, the product of the lengths before the examples' dimension: 1 where it is the first.
        self._before: dict[object, int] = {}
        tensors = [each for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor) and each.ndim]
        square = any(each.shape[:2] == (examples, examples) for each in tensors)
        for tensor in tensors:
            if len(tensor) == examples and not (square and is_range(tensor)):
                self._note_own(tensor)
                self._before[_form(tensor)] = 1

    def require_first(self, output: Tensor, name: str) -> None:
        """Refuse a layer's output with the examples in another dimension than the first (InputError).

        Its shape does not show that if two dimensions have as many places as there are examples.
        """
        if output.ndim and len(output) == self._examples > 1 and self._before.setdefault(_form(output), 1) > 1:
            raise InputError(
                f"module {name}: its output has shape {tuple(output.shape)}, in which the examples are not the first "
                "dimension. Apply it to each example (its input transposed), or freeze it (requires_grad_(False))"
            )

    def spread(self, output: Tensor, name: str, positions: bool) -> Spread | None:
        """How to add a dimension of examples to a layer's output; None if it has one, or if backward does not reach it.

        ``positions`` is whether the layer embeds the numbers 0, 1, 2, …
        """
        if _key(output) in self._own or output.ndim == 0:
            return None
        if len(output) == 1 and not positions:
            return "expanded" if self._examples > 1 else None
        if positions:
            return "added"
        if len(output) == self._examples and not bool((output == output[:1]).all()):
            raise InputError(
                f"module {name}: its output has shape {tuple(output.shape)}, and does not depend on the model's "
                f"inputs, so that its {self._examples} rows are not the examples'. Apply it to each example (expand "
                "its input to the batch), or freeze it (requires_grad_(False))"
            )
        return None

    def note(self, output: Tensor, name: str, spread: Spread) -> None:
        """Treat a spread tensor as the examples' own, and follow it."""
        storage = StorageWeakRef(output.untyped_storage())
        self._shared[storage.cdata] = (storage, name, spread)
        self._note_own(output)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note whether its results come from the examples."""
        results = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        own = [tensor for tensor in given if _key(tensor) in self._own]
        if own:
            shared = [tensor for tensor in given if _key(tensor) in self._shared]
            for result in _tensors(results):
                for tensor in shared:
                    self._check(func, tensor, own, result)
                self._note_before(func, args, own, result)
                if len(shared) == len(own) and result.ndim and len(result) == self._examples:
                    self.note(result, *self._shared[_key(shared[0])][1:])
                elif not func.__name__.startswith("new_") and "_like" not in func.__name__:  # which see shapes alone
                    self._note_own(result)
        return results

    def _note_own(self, tensor: Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        self._own.setdefault(storage.cdata, storage)

    def _note_before(self, func: Any, args: Any, own: list[Tensor], result: Tensor) -> None:
        """Note what is before the examples in a result, where that is certain."""
        name = func._schema.name.removeprefix("aten::")
        found = {self._before_in(name, args, tensor, result) for tensor in own if _form(tensor) in self._before}
        if len(found) == 1 and (before := found.pop()) is not None:
            self._before[_form(result)] = before

    def _before_in(self, name: str, args: Any, tensor: Tensor, result: Tensor) -> int | None:
        """What is before the examples in a result of this tensor; None if that is not certain."""
        before, shape = self._before[_form(tensor)], tensor.shape
        same_rows = tensor.ndim == result.ndim == 2 and len(tensor) == len(result) and name in ("mm", "addmm")
        if name in ("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze"):
            return before
        places = [at for at, length in enumerate(shape) if length == self._examples]
        at = next((each for each in places if math.prod(shape[:each]) == before), None)
        if at is None:
            return before if same_rows else None
        if name in ("transpose", "permute", "t"):
            at = _moved(name, args, tensor.ndim, at)
        keeps = result.ndim == tensor.ndim and result.shape[at] == self._examples and name != "as_strided"
        return math.prod(result.shape[:at]) if keeps else None

    def _check(self, func: Any, tensor: Tensor, own: list[Tensor], result: Tensor) -> None:
        _, name, spread = self._shared[_key(tensor)]
        length = result.shape[0] if result.ndim else 0
        begins, flat = length == self._examples, len(tensor) != self._examples
        merged = length % self._examples == 0 and (flat or result.numel() == tensor.numel())
        if torch.Tag.nondeterministic_seeded in func.tags:
            fits = False  # it would draw anew for each example
        elif _key(result) == _key(tensor):
            same = length == len(tensor) and result.stride(0) == tensor.stride(0)
            fits = same or (merged and result.ndim < tensor.ndim) or (flat and begins)
        elif torch.Tag.pointwise in func.tags:
            fits = length == len(tensor) and result.ndim == tensor.ndim
            fits = fits and (spread == "expanded" or all(each.ndim == tensor.ndim for each in own))
        else:
            fits = (begins or merged) and result.shape != tensor.shape[1:]
        if not fits:
            raise InputError(
                f"module {name}: its output is the same for all examples, and {func.__name__.split('.')[0]} does with "
                "it what cannot be followed for each of them. Have the module return it with the examples in the "
                "first dimension (expand its input to the batch), or freeze it (requires_grad_(False))"
            )


def is_range(tensor: Tensor) -> bool:
    """Whether these are the whole numbers 0, 1, 2, …"""
    whole = tensor.ndim == 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool and len(tensor) > 1
    return whole and torch.equal(tensor, torch.arange(len(tensor), device=tensor.device, dtype=tensor.dtype))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _moved(name: str, args: Any, dimensions: int, at: int) -> int:
    """Where a dimension is after a transposition."""
    order = list(range(dimensions))
    if name == "permute":
        order = [each % dimensions for each in args[1]]
    else:
        one, other = args[1:3] or (0, -1)
        order[one], order[other] = order[other], order[one]
    return order.index(at)


def _form(tensor: Tensor) -> object:
    """What tells a view of some memory from its other views."""
    return _key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
