"""The common part of rules that keep a component by the agreement of its signs alone."""

from dataclasses import dataclass
from typing import ClassVar, Self

from concord.aggregation.agreement import check_threshold
from concord.aggregation.chance import chance_of, threshold_at_chance


@dataclass(frozen=True)
class SignMask:
    """A threshold τ of the agreement of signs: |Σ sign g| ≥ τd."""

    threshold: float = 1.0
    """Agreement threshold τ, in [0, 1]; 1 asks all environments to agree."""
    threshold_by_chance: ClassVar[bool] = True
    """Whether the default threshold is the least that chance seldom reaches."""

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    @classmethod
    def at_chance(cls, significance: float, environments: int) -> Self:
        """The rule with the least threshold that signs reach by chance with at most this probability.

        Args:
            significance: the probability, if the signs of the environments were independent and fair.
            environments: d, the number of environments at a step.

        Raises:
            ArgumentError: even full agreement is more probable by chance.
        """
        return cls(threshold_at_chance(significance, environments))

    def chance(self, environments: int) -> float:
        """The part of the components that is kept by chance, if the d environments' signs are independent and fair."""
        return chance_of(self.threshold, environments)
