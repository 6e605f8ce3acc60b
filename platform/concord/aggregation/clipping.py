"""Clipping by environment (McMahan, Ramage, Talwar, Zhang: Learning differentially private language models, 2018)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from concord.errors import ArgumentError
from concord.space import Entries, LogUniform


@dataclass(frozen=True)
class Clipping:
    """The mean of the gradients, each scaled down to at most norm c: Σ min(1, c / ‖g_e‖) g_e / d (algorithm 1).

    So no environment moves the model further than c / d, with c above 0.
    """

    clip_norm: float = 1.0
    """Largest norm of an environment's gradient (clip)."""
    space: ClassVar[Entries] = {"clip_norm": LogUniform(1e-2, 1e2)}

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise ArgumentError("clip_norm", self.clip_norm, "must be above 0")

    def weights(self, gram: Tensor) -> Tensor:
        """min(1, c / ‖g_e‖) / d."""
        return (self.clip_norm / gram.diagonal().sqrt()).clamp(max=1) / len(gram)
