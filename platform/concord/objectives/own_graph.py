"""Derivatives within an objective, which a caller may also measure under ``torch.no_grad``."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Arguments = ParamSpec("Arguments")
Tensors = TypeVar("Tensors")


def with_own_graph(differentiate: Callable[Arguments, Tensors]) -> Callable[Arguments, Tensors]:
    """Give a function that calls ``torch.autograd.grad`` a graph of its own under ``no_grad``; its result has none."""

    @functools.wraps(differentiate)
    def measured(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensors:
        if torch.is_grad_enabled():
            return differentiate(*args, **kwargs)
        with torch.enable_grad():
            result = differentiate(*args, **kwargs)
        detached: Tensors = pytree.tree_map(Tensor.detach, result)
        return detached

    return measured
