"""Rules that turn the gradients of several environments into one update: map, sum, finish.

A rule never sees the environments' gradients side by side. It names the statistics of one environment's gradient that
it needs (``statistics``), their values are added (over a stacked dimension, over processes, over examples, over time),
and it turns the sums into the update (``finish``). Three rules as instances:

* mean: statistics ``g``; finish ``Σg / d``.
* AND-mask: statistics ``g, sign g``; finish ``Σg / d`` where ``|Σ sign g| ≥ τd``, else 0.
* geometric mean: statistics ``g, sign g, log|g|``; finish ``sign(Σg) · exp(Σ log|g| / d)`` under the same mask.

So a new rule is a frozen dataclass with these two parts, in one file, and runs wherever the others run. A new
statistic is a :class:`Statistic`: a name and a function. Rules that need more than sums are of two other families:
:mod:`weightings <concord.aggregation.weighting>`, which need the inner products of whole gradients, and
:mod:`column rules <concord.aggregation.column_rule>`, which need all values of a component. In a training loop of one's
own, with ``gradients`` of shape ``(environments, *parameter.shape)``::

    parameter.grad = aggregate(AndMask(threshold=0.8), gradients).value
"""

from concord.aggregation.agreement import kept_where_signs_agree, required_agreement, rescaling_factor
from concord.aggregation.and_mask import AndMask
from concord.aggregation.cagrad import CAGrad
from concord.aggregation.chance import DEFAULT_SIGNIFICANCE, agreeing_signs, chance_of, threshold_at_chance
from concord.aggregation.clipping import Clipping
from concord.aggregation.column_rule import ColumnRule
from concord.aggregation.families import Rule
from concord.aggregation.geometric_mean import GeometricMean
from concord.aggregation.krum import Krum
from concord.aggregation.mean import Mean
from concord.aggregation.median import Median
from concord.aggregation.mgda import MGDA
from concord.aggregation.pcgrad import PCGrad
from concord.aggregation.rule import Aggregator, Update, aggregate, sum_over_environments
from concord.aggregation.rules_by_name import (
    AGGREGATORS,
    RULES,
    aggregator,
    aggregator_at_chance,
    default_threshold,
    rule_type,
)
from concord.aggregation.sand_mask import SandMask
from concord.aggregation.sign_mask import SignMask
from concord.aggregation.statistic import (
    GRADIENT,
    LOG_MAGNITUDE,
    SIGN,
    SQUARE,
    Statistic,
    Statistics,
    check_statistics,
)
from concord.aggregation.t_mask import TMask
from concord.aggregation.temporal_agreement import TemporalAgreementAdam, TemporalAndMaskAdam
from concord.aggregation.trimmed_mean import TrimmedMean
from concord.aggregation.upgrad import UPGrad
from concord.aggregation.weighting import Weighting, weights_of
from concord.aggregation.xor_mask import XorMask

__all__ = [
    "AGGREGATORS",
    "DEFAULT_SIGNIFICANCE",
    "GRADIENT",
    "LOG_MAGNITUDE",
    "MGDA",
    "RULES",
    "SIGN",
    "SQUARE",
    "Aggregator",
    "AndMask",
    "CAGrad",
    "Clipping",
    "ColumnRule",
    "GeometricMean",
    "Krum",
    "Mean",
    "Median",
    "PCGrad",
    "Rule",
    "SandMask",
    "SignMask",
    "Statistic",
    "Statistics",
    "TMask",
    "TemporalAgreementAdam",
    "TemporalAndMaskAdam",
    "TrimmedMean",
    "UPGrad",
    "Update",
    "Weighting",
    "XorMask",
    "aggregate",
    "aggregator",
    "aggregator_at_chance",
    "agreeing_signs",
    "chance_of",
    "check_statistics",
    "default_threshold",
    "kept_where_signs_agree",
    "required_agreement",
    "rescaling_factor",
    "rule_type",
    "sum_over_environments",
    "threshold_at_chance",
    "weights_of",
]
