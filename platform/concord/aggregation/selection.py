"""The rules by the names that the command line and configurations use."""

from typing import Literal, get_args

from concord.aggregation.and_mask import AndMask
from concord.aggregation.geometric_mean import GeometricMean
from concord.aggregation.mean import Mean
from concord.aggregation.rule import Aggregator
from concord.aggregation.sand_mask import SandMask
from concord.aggregation.xor_mask import XorMask
from concord.errors import ArgumentError

AggregatorName = Literal["mean", "and-mask", "geometric-mean", "xor-mask", "sand-mask"]
AGGREGATORS: tuple[str, ...] = get_args(AggregatorName)


def aggregator(name: AggregatorName, threshold: float = 1.0) -> Aggregator:
    """The rule called ``name`` with agreement threshold τ (which ``mean`` does not use).

    Raises:
        ArgumentError: no rule has this name, or τ is outside [0, 1].
    """
    match name:
        case "mean":
            return Mean()
        case "and-mask":
            return AndMask(threshold)
        case "geometric-mean":
            return GeometricMean(threshold)
        case "xor-mask":
            return XorMask(threshold)
        case "sand-mask":
            return SandMask(threshold)
    raise ArgumentError("aggregator", name, f"must be one of {', '.join(AGGREGATORS)}")
