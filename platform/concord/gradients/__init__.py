"""How per-environment gradients are obtained and summed; what is made of the sums is the aggregator's.

* :class:`StackedGradients`: several environments in one process, by one vectorized backward pass. With a process
  group, the two-level form: several environments in each of several processes.
* :func:`register_aggregation_hook`: one environment a process, as a communication hook of
  ``DistributedDataParallel`` that overlaps with backward.
"""

from concord.gradients.hook import AggregationHook, HookedGradients, aggregation_hook, register_aggregation_hook
from concord.gradients.nonfinite import NonFinite, NonFiniteGradientError
from concord.gradients.stacked import StackedGradients
from concord.gradients.step import EnvironmentStep

__all__ = [
    "AggregationHook",
    "EnvironmentStep",
    "HookedGradients",
    "NonFinite",
    "NonFiniteGradientError",
    "StackedGradients",
    "aggregation_hook",
    "register_aggregation_hook",
]
