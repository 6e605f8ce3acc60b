"""The three families of rules, by what they need of the environments' gradients: sums, inner products, columns."""

from typing import Any

from concord.aggregation.column_rule import ColumnRule
from concord.aggregation.rule import Aggregator
from concord.aggregation.statistic import check_statistics
from concord.aggregation.weighting import GramFunction, Weighting, name_of
from concord.errors import InputError

Rule = Aggregator | Weighting | ColumnRule


def as_rule(rule: Any) -> Rule:
    """Check the rule and return it; a weighting of TorchJD becomes a rule.

    Raises:
        InputError: it belongs to no family, or its statistics lack a property that they claim.
    """
    kinds = {kind.__name__ for kind in type(rule).__mro__}
    if "Weighting" in kinds and "_MatrixWeighting" not in kinds and not isinstance(rule, Weighting):
        return GramFunction(rule)
    if not isinstance(rule, Weighting | ColumnRule):
        check_statistics(rule)
    known: Rule = rule
    return known


def masks(rule: Rule) -> bool:
    """Whether the rule masks single components."""
    return not isinstance(rule, Weighting | ColumnRule)


def of_sums(rule: Any, place: str) -> Aggregator:
    """Check that the rule needs only sums over environments, and return it; ``place`` is named in the error."""
    known = as_rule(rule)
    if isinstance(known, Weighting | ColumnRule):
        needs = "inner products of whole gradients" if isinstance(known, Weighting) else "all values of a component"
        raise InputError(
            f"rule {name_of(known)}: needs {needs}, which {place} does not have; it runs with StackedGradients, "
            "HookedGradients and register_aggregation_hook"
        )
    return known
