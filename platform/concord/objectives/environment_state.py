"""Values that an objective keeps for every environment from one step to the next."""

from typing import cast

import torch
from torch import Tensor, nn

from concord.aggregation.rule import accumulation_dtype
from concord.errors import ArgumentError


class EnvironmentState(nn.Module):
    """Values ``(environments, ...)``, at first ``fill``, as an objective's module, which checkpoints contain.

    They are on the model's device, in its dtype or in float32 if that is wider. Checkpoints have them as ``name``.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...], fill: float, name: str = "values") -> None:
        super().__init__()
        first = next(model.parameters())
        dtype = accumulation_dtype([first.dtype])
        self.name = name
        self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=first.device))

    @property
    def kept(self) -> Tensor:
        """The values of the last step."""
        return self.get_buffer(self.name)

    @classmethod
    def of(cls, module: nn.Module | None, objective: str) -> "EnvironmentState":
        """An objective's module, if :meth:`~concord.objectives.Objective.begin` has made it (else ArgumentError)."""
        if module is None:
            raise ArgumentError("objective", objective, "it keeps nothing yet; call begin with the model first")
        return cast(EnvironmentState, module)

    def keep(self, values: Tensor) -> None:
        """Keep the values for the next step; nothing is kept without a graph, as in an evaluation.

        A value that is not finite leaves all as they were: the step may be skipped, and it would stay for ever.
        """
        if torch.is_grad_enabled():
            found = values.detach()
            self.kept.copy_(torch.where(found.isfinite().all(), found, self.kept))
