"""Baselines: what people would use in place of a method, as configurations of a job.

A baseline is fitted to all training examples at once, and not by steps. Otherwise it is a run like any other: with the
same data, held-out examples, seeds, record, checkpoint and registered model.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from concord.space import Choice, LogUniform, Space, Value

Fit = Callable[..., None]
"""Sets the weights of a model from all training inputs and targets, ``(examples, ...)``, on the CPU, and the examples'
weights ``(examples,)`` if they have some: ``fit(model, inputs, targets)``."""


@dataclass(frozen=True)
class Baseline:
    """A configuration of a job that is no method.

    Attributes:
        options: those that make it.
        space: of its search, as large as a method's.
    """

    options: Mapping[str, Value]
    space: Space


def fit_table(config: Any) -> Fit | None:
    """How a table's baseline is fitted; None for a network, which is trained by steps."""
    options = config.network_options
    return None if options.baseline is None else functools.partial(options.fit, seed=config.run.seed)


TABLE_BASELINES = {
    "ridge": Baseline({"network": "ridge"}, Space({"ridge_penalty": LogUniform(1e-2, 1e3)})),
    "boosting": Baseline(
        {"network": "boosting"},
        Space({"boosting_rate": LogUniform(0.02, 0.3), "boosting_leaves": Choice(4, 8, 16, 31)}),
    ),
}
"""Of jobs whose ``network_options`` are :class:`~concord.models.table_network_options.TableNetworkOptions`."""
