"""A batch whose examples count by a weight; a module of its own, since data and gradients share no other."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Weighted(NamedTuple):
    """Inputs and targets whose examples count by a weight above 0, ``(examples,)``."""

    inputs: Any
    targets: "Tensor"
    weights: "Tensor"
