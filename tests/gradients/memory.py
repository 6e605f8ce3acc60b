"""The memory of the tensors that exist at once."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is entered.

    Attributes:
        peak: the most bytes that existed at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = {each.untyped_storage()._cdata for each in given}
        result = func(*args, **(kwargs or {}))
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in known:
                storage = each.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result
