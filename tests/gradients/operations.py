"""Counts the operations of a training step: those that start work on a device, and those for which the host waits.

There is no device: the step runs on a CPU in the way of a GPU, see ``concord.aggregation.asynchronous``. What the step
brings to the host (``.cpu()``) is the host's from then on, and so is what is computed of it alone: it is not counted.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_TO_HOST = {Tensor.cpu, Tensor.tolist, Tensor.numpy}
# They describe memory or allocate it, and no kernel runs.
_FREE = {"alias", "detach", "detach_", "lift_fresh", "resize_", "set_", "_reshape_alias", "_unsafe_view"}
_FREE |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


_active: list["Operations"] = []


def of_host(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which computes on the host alone: nothing of it is counted."""

    def uncounted(*arguments: Any) -> Tensor:
        active, _active[:] = list(_active), []
        with _disable_current_modes():
            result = function(*arguments)
        _active[:] = active
        for operations in active:
            operations._keep(result)
        return result

    return uncounted


class Operations(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        dispatched: all operations by name, views too.
        started: those that start work.
        reads: those whose result the host waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dispatched: Counter[str] = Counter()
        self.started: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._moves = _Moves(self)
        self._host: dict[int, Tensor] = {}  # by storage; they are kept, so that no other tensor gets their memory

    def __enter__(self) -> "Operations":
        _active.append(self)
        self._moves.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._moves.__exit__(*problem)
        _active.remove(self)

    def bring(self, tensor: Tensor, how: str) -> None:
        """Note that the host reads a tensor."""
        if not self._is_on_host(tensor):
            self.reads[how] += 1
            self._keep(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if given and all(map(self._is_on_host, given)):
            for each in pytree.tree_leaves(result):
                if isinstance(each, Tensor):
                    self._keep(each)
            return result
        self.dispatched[name] += 1
        by_mask = name in ("index", "index_put", "index_put_") and any(each.dtype == torch.bool for each in given)
        if name in _READS or by_mask:
            self.reads[name] += 1
        elif name not in _FREE and not func.is_view:
            self.started[name] += 1
        return result

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def _keep(self, tensor: Tensor) -> None:
        self._host[tensor.untyped_storage()._cdata] = tensor


class _Moves(TorchFunctionMode):
    def __init__(self, counted: Operations) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TO_HOST and _active:
            self._counted.bring(args[0], func.__name__)
        return result
