"""An environment's batch in pieces, so that a step needs the memory of one piece's pass, not of the whole batch's.

The gradient of a mean over examples is the weighted mean of its pieces' gradients. It is complete before the rule sees
it, so a piece has no vote of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError, InputError
from concord.gradients.risk import Batch, divisor


class Pieces:
    """Divides batches of a model into pieces of about equal size.

    Args:
        model: the model.
        count: the number of pieces of a batch; a batch of fewer examples has as many pieces as examples.

    Raises:
        ArgumentError: the number is below 1.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        if count < 1:
            raise ArgumentError("accumulate", count, "must be at least 1")
        self._model, self.count = model, count

    def of(self, batch: Batch, dim: int = 0) -> list[Batch]:
        """The pieces of a batch, whose examples are dimension ``dim``; batch norm is refused (InputError)."""
        if self.count == 1:
            return [batch]
        for name, module in self._model.named_modules():
            if normalizes_over_the_batch(module):
                raise InputError(
                    f"accumulate={self.count}: module {name or 'model'} ({type(module).__name__}) normalizes over the "
                    "batch, and would normalize each piece by itself; give 1, or a model with GroupNorm or LayerNorm"
                )
        leaves, structure = pytree.tree_flatten(batch)
        split = [leaf.tensor_split(min(self.count, leaf.shape[dim]), dim) for leaf in leaves]
        return [pytree.tree_unflatten(list(parts), structure) for parts in zip(*split, strict=True)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class MeanOfPieces:
    """The running mean of environments' risks and gradients over the pieces of their batches.

    Attributes:
        gradients: of each parameter, ``(environments, *shape)``.
        risk, weight: ``(environments,)``; a weight is that of all pieces so far.
    """

    def __init__(self, gradients: Sequence[Tensor], risk: Tensor, weight: Tensor) -> None:
        self.gradients, self.risk, self.weight = list(gradients), risk, weight

    def add(self, gradients: Sequence[Tensor], risk: Tensor, weight: Tensor) -> None:
        """Add a piece; its tensors are shaped as those of the first one."""
        self.weight = self.weight + weight
        share = weight / divisor(self.weight)
        self.risk = self.risk.lerp(risk, share.to(risk.dtype))
        for index, gradient in enumerate(gradients):
            shape = (-1,) + (1,) * (gradient.ndim - 1)
            self.gradients[index] = self.gradients[index].lerp(gradient, share.to(gradient.dtype).view(shape))


def normalizes_over_the_batch(module: nn.Module) -> bool:
    """Whether this module, in its present mode, normalizes by the statistics of the batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
