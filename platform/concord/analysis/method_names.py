"""The published names of methods, for tables and figures."""

from concord.aggregation.rules_by_name import RULES
from concord.objectives.objectives_by_name import OBJECTIVES

# The published names of other options and studies; rules and objectives know their own.
_METHODS = {
    "plain": "average",
    "l1": "L1",
    "l2": "L2",
    "batch-norm": "batch norm",
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "temporal-and-mask": "temporal AND-mask Adam",
    "tpe": "TPE",
    "ridge": "ridge regression",
    "boosting": "gradient boosting",
}


def method_name(method: str) -> str:
    """The published names of methods with commas between: ``vrex`` is V-REx. A user's own names are unchanged."""
    return ", ".join(map(_published, method.split(", ")))


def _published(name: str) -> str:
    declared = getattr(RULES.get(name) or OBJECTIVES.get(name), "display_name", None)
    return declared or _METHODS.get(name, name)
