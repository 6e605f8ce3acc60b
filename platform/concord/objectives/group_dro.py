"""Distributionally robust optimization over groups: the environments with large risks weigh more."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from concord.errors import ArgumentError
from concord.gradients.risk import Loss, Risk
from concord.objectives.environment_state import EnvironmentState
from concord.objectives.objective import Objective, require_all, require_several
from concord.space import Entries, LogUniform


class GroupDRO(Objective):
    """The weighted sum of the risks, Σ q_e R_e, with weights q_e that grow where the risk is large.

    Before each step q_e ← q_e exp(η R_e) / Σ q_e exp(η R_e), starting from q_e = 1/d. Sagawa et al., Distributionally
    Robust Neural Networks for Group Shifts, 2020, algorithm 1, with every group in each batch.

    Args:
        loss: the loss or the risk of one environment.
        rate: Step size η of the environments' weights (group-dro).
        autocast: the dtype in which layers compute.

    Attributes:
        module: the logarithms of the weights q_e, which :meth:`begin` makes. A weight itself would reach 0, and stay.

    Raises:
        InputError: the rate is not above 0.
    """

    every: ClassVar[bool] = True
    display_name: ClassVar[str | None] = "GroupDRO"
    option_names: ClassVar[Mapping[str, str]] = {"rate": "group_rate"}
    space: ClassVar[Entries] = {"group_rate": LogUniform(1e-3, 1e-1)}

    def __init__(self, loss: Loss | Risk, rate: float = 0.01, autocast: torch.dtype | None = None) -> None:
        super().__init__(loss, autocast)
        if not rate > 0:
            raise ArgumentError("group_rate", rate, "must be above 0")
        self.rate = rate

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Make the weights, all equal."""
        self.module = EnvironmentState(model, (environments,), -math.log(environments), "logarithms")

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """Update the weights, and return the weighted sum."""
        require_several(len(terms), "group-dro")
        state = EnvironmentState.of(self.module, "group-dro")
        require_all(len(terms), len(state.kept), "group-dro")
        logarithms = (state.kept + self.rate * terms.detach()).log_softmax(0)
        state.keep(logarithms)
        return (logarithms.exp() * terms).sum()
