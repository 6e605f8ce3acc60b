"""What one step over environments gives back, whichever way the gradients were obtained."""

from typing import NamedTuple

from torch import Tensor


class EnvironmentStep(NamedTuple):
    """The result of one call of a gradient source, which left the aggregated gradient in ``parameter.grad``.

    Attributes:
        losses: ``(local environments,)``, each environment's mean loss in this process.
        kept_fraction: ``(parameters,)``, the part of each parameter tensor's components that the rule let through,
            in the order of ``model.named_parameters()``; float32.
        skipped: names of environments that were left out, in any process, because their gradient was not finite.
    """

    losses: Tensor
    kept_fraction: Tensor
    skipped: tuple[str, ...]
