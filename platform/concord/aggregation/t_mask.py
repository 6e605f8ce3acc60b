"""A mask by Student's t-test, which tests whether a mean differs from 0 in place of counting signs.

Of the environments' gradients, t² is d times what is called the gradient's signal-to-noise ratio (Liu, Jiang, Bai,
Chen, Wang: Understanding why neural networks generalize well through GSNR of parameters, ICLR 2020), there of examples.
The test is Student's (The probable error of a mean, Biometrika, 1908).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from concord.aggregation.rule import Update
from concord.aggregation.statistic import GRADIENT, SQUARE, Statistic, Statistics
from concord.errors import ArgumentError
from concord.space import Entries, LogUniform


@dataclass(frozen=True)
class TMask:
    """The average gradient where a mean of 0 is refuted: Σg / d where |t| ≥ q, zero elsewhere.

    t = ḡ √d / s, with s² the unbiased variance of the component over the environments, and q the quantile of Student's
    t with d - 1 degrees of freedom that a fraction p of independent normal gradients around 0 exceeds. So p may be as
    small as you like for any d of 2 or more, while d signs agree by chance with probability 2^(1 - d). The price:
    components that agree in sign but not in size are dropped; averages of each environment's gradients over its steps
    (``--environment-momentum``) agree more in size than those of one batch.

    Where all gradients are equal, t is infinite. One environment has nothing to compare: as with the other masks, every
    component except zeros is kept.
    """

    significance: float = 1e-4
    """p, the part of the components that chance keeps, above 0 and below 1."""

    # Good values on the spirals with 7 to 32 environments are 1e-5 to 1e-3 (docs/results.md).
    space: ClassVar[Entries] = {"significance": LogUniform(1e-6, 1e-1)}

    counts_environments: ClassVar[bool] = True
    """Its test depends on the number of environments, which an average over steps does not have."""

    # Σg² is compared with (Σg)² / d, from which it differs by (d - 1) / q² where t is just q: for d = 2 and p = 1e-6 by
    # 2.5e-12 of it, which float64 tells apart. float64 holds the square of any float32 gradient.
    statistics: ClassVar[tuple[Statistic, ...]] = (
        replace(GRADIENT, dtype=torch.float64),
        replace(SQUARE, dtype=torch.float64),
    )

    def __post_init__(self) -> None:
        if not 0 < self.significance < 1:
            raise ArgumentError("significance", self.significance, "must lie between 0 and 1 for the t-mask")

    @classmethod
    def at_chance(cls, significance: float, environments: int) -> Self:
        """The rule with this significance, which holds for any number of environments."""
        return cls(significance)

    def quantile(self, environments: int) -> float:
        """q, the least |t| that is kept, for 2 environments or more."""
        return _quantile(environments, self.significance)

    def chance(self, environments: int) -> float:
        """The part of the components that is kept if the environments' gradients are independent and normal: p."""
        return self.significance if environments > 1 else 1.0

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The masked average."""
        total, square = sums["gradient"], sums["square"]
        kept = total != 0
        if environments > 1:
            # t² ≥ q² without a division: (Σg)² (d - 1) ≥ q² (d Σg² - (Σg)²), which is (Σg)² (d - 1 + q²) ≥ q² d Σg².
            asked = self.quantile(environments) ** 2
            kept &= total.square() * ((environments - 1 + asked) / (asked * environments)) >= square
        return Update((total / environments).mul_(kept), kept.to(total.dtype))


def _quantile(environments: int, significance: float) -> float:
    from scipy.special import stdtrit  # here, since every worker imports this module and few need SciPy

    return -float(stdtrit(environments - 1, significance / 2))


# What torch.compiler.assume_constant_result does, which takes a second to import: a compiler cannot follow SciPy.
vars(_quantile)["_dynamo_marked_constant"] = True
