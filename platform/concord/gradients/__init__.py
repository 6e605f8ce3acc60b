"""Computes the environments' gradients and sums the aggregator's statistics of them.

* :class:`StackedGradients`: several environments in one process, by one vectorized backward pass. With a process
  group, the two-level form: several environments in each of several processes.
* :func:`register_aggregation_hook`: one environment a process, as a communication hook of
  ``DistributedDataParallel`` that overlaps with backward.
* :func:`register_aggregation`: the same for a model that ``fully_shard`` has divided among the processes.
* :func:`per_example`: every example is an environment, with one ordinary backward pass in any loop;
  :class:`PerExampleGradients` is the same in one call.
"""

from concord.gradient_policies import ExampleGradient, NonFinite
from concord.gradients.hook import AggregationHook, HookedGradients, aggregation_hook, register_aggregation_hook
from concord.gradients.nonfinite import NonFiniteGradientError
from concord.gradients.per_example import PerExample, per_example
from concord.gradients.per_example_gradients import PerExampleGradients
from concord.gradients.risk import Batch, Loss, Risk, Supervised
from concord.gradients.sharded_hook import ShardedAggregation, register_aggregation
from concord.gradients.stacked import StackedGradients
from concord.gradients.step import Aggregation, AggregationOptions, EnvironmentStep, GradientSource
from concord.gradients.step_clock import StepClock

__all__ = [
    "Aggregation",
    "AggregationHook",
    "AggregationOptions",
    "Batch",
    "EnvironmentStep",
    "ExampleGradient",
    "GradientSource",
    "HookedGradients",
    "Loss",
    "NonFinite",
    "NonFiniteGradientError",
    "PerExample",
    "PerExampleGradients",
    "Risk",
    "ShardedAggregation",
    "StackedGradients",
    "StepClock",
    "Supervised",
    "aggregation_hook",
    "per_example",
    "register_aggregation",
    "register_aggregation_hook",
]
