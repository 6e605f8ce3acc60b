"""UPGrad (Quinton, Rey: Jacobian descent for multi-objective optimization, 2024, arXiv 2406.16232)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concord.aggregation.nonnegative import nonnegative_minimum
from concord.errors import ArgumentError


@dataclass(frozen=True)
class UPGrad:
    """The mean of the gradients, each projected onto the cone of directions that no environment's gradient opposes.

    The projection of g_i is Σ_e v_e g_e with the v ≥ e_i that minimizes vᵀGv (proposition 1, equation 5).
    """

    constants: ClassVar[tuple[str, ...]] = ("ridge",)
    ridge: float = 1e-4
    """Part of ‖J‖² that is added to G's diagonal, above 0, so that v is unique."""

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise ArgumentError("ridge", self.ridge, "must be above 0")

    def weights(self, gram: Tensor) -> Tensor:
        """The sum of all v / d."""
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        trace = gram.trace()
        regular = (gram / trace if trace > 0 else gram) + self.ridge * eye
        # v = e_i + x with x ≥ 0; row i of G is the gradient at x = 0.
        return (eye + nonnegative_minimum(regular, regular)).mean(0)
