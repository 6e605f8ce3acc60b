"""The graph of a backward pass: what it reaches, and the gradients that it gives parameters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from concord.errors import InputError

# Of torch.utils.checkpoint with use_reentrant=True, and of libraries that have copied it.
_REENTRANT = "CheckpointFunction"


def nodes_behind(tensors: Sequence[Tensor], ends: Sequence[GradientEdge] = ()) -> Iterator[Any]:
    """The nodes that backward from these tensors reaches, without those at ``ends`` and behind them."""
    seen = {end[:2] for end in ends}
    ways: list[tuple[Any, int]] = [get_gradient_edge(each)[:2] for each in tensors if each.requires_grad]
    while ways:
        way = ways.pop()
        if way not in seen:
            seen.add(way)
            yield way[0]
            ways += [each for each in way[0].next_functions if each[0] is not None]


def is_reentrant(node: Any) -> bool:
    """Whether a node is that of layers under reentrant checkpointing, which the graph does not show."""
    return str(node.name()).startswith(_REENTRANT)


def gradients_of(loss: Tensor, parameters: Mapping[str, Tensor], *, keeps_graph: bool = False) -> list[Tensor]:
    """The gradients of parameters, dense, and 0 where the loss does not depend on one.

    Raises:
        InputError: a parameter may be in a layer under reentrant checkpointing, whose gradients only a backward pass
            into ``parameter.grad`` gives: here they would be 0.
    """
    values = list(parameters.values())
    found = torch.autograd.grad(loss, values, retain_graph=keeps_graph, allow_unused=True)
    missing = next((name for name, each in zip(parameters, found, strict=True) if each is None), None)
    if missing is not None and any(map(is_reentrant, nodes_behind([loss]))):
        raise InputError(
            f"parameter {missing}: has no gradient under reentrant checkpointing; take use_reentrant=False "
            '(of transformers: gradient_checkpointing_enable({"use_reentrant": False}))'
        )
    dense = (each.to_dense() if each is not None and each.is_sparse else each for each in found)
    return [torch.zeros_like(value) if each is None else each for value, each in zip(values, dense, strict=True)]
