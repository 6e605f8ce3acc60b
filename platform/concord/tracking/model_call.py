"""How a risk calls its model: with named tensors. So a model of dictionaries can be exported and called by name.

``model(**batch)`` names its tensors by keyword, ``model(batch)`` by the batch's keys, ``model(x)`` by the parameter.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

OUTPUT = "output"  # the name of an output that is one tensor


@dataclass(frozen=True)
class ModelCall:
    """The arguments of a call, of which every tensor has a name.

    Attributes:
        inputs: the tensors by name, each ``(examples, ...)``.
        leaves: all arguments in order: a tensor's name, or a constant in a tuple.
        structure: the tree of the arguments.
    """

    inputs: Mapping[str, Tensor]
    leaves: Sequence[str | tuple[Any]]
    structure: pytree.TreeSpec

    def __call__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the model's output that have a row for each example; zeros take the place of absent inputs."""
        some = next(iter(inputs.values()))
        given = {
            name: inputs[name]
            if name in inputs
            else torch.zeros((some.shape[0], *like.shape[1:]), dtype=like.dtype, device=some.device)
            for name, like in self.inputs.items()
        }
        values = [given[leaf] if isinstance(leaf, str) else leaf[0] for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(values, self.structure)
        outputs = model(*args, **kwargs)
        named = {OUTPUT: outputs} if isinstance(outputs, Tensor) else outputs
        if not isinstance(named, Mapping):
            raise TypeError(f"the model gives {type(outputs).__name__}; a tensor, or tensors by name, can be kept")
        return {str(name): each for name, each in named.items() if isinstance(each, Tensor) and each.ndim > 0}

    def rows(self, places: Sequence[int]) -> "ModelCall":
        """The same call with these examples."""
        return replace(self, inputs={name: each[list(places)] for name, each in self.inputs.items()})


def first_call(model: nn.Module, risk: Callable[[nn.Module, Any, int], Any], batch: Any) -> ModelCall | None:
    """The first call of the model by the risk of a batch; None if there is none, or it has no tensor."""
    seen: list[tuple[Any, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with hook, torch.no_grad():
        risk(model, batch, 0)
    if not seen:
        return None
    parameters = list(inspect.signature(model.forward).parameters)
    paths, structure = pytree.tree_flatten_with_path(seen[0])
    leaves: list[str | tuple[Any]] = []
    inputs: dict[str, Tensor] = {}
    for path, value in paths:
        if isinstance(value, Tensor):
            name = ".".join(_names(path, parameters))
            inputs[name] = value.detach().cpu()
            leaves.append(name)
        else:
            leaves.append((value,))
    return ModelCall(inputs, leaves, structure) if inputs else None


def _names(path: Sequence[Any], parameters: Sequence[str]) -> Iterator[str]:
    """The names on the way to a tensor: of the parameter, unless it takes a dictionary, and the keys."""
    (side, first), rest = path[:2], path[2:]
    if side.idx == 1 or not rest:
        yield str(first.key) if side.idx == 1 else parameters[min(first.idx, len(parameters) - 1)]
    for key in rest:
        yield str(getattr(key, "key", getattr(key, "idx", key)))
