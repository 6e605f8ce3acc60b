"""The options that every training run has, in groups; a job adds its own by deriving from :class:`TrainConfig`."""

from concord.training.options.aggregation import AggregatorOptions
from concord.training.options.data import DataOptions
from concord.training.options.objective import ObjectiveOptions
from concord.training.options.optimizer import OptimizerOptions
from concord.training.options.parallel import ParallelOptions
from concord.training.options.run import RunConfig, RunOptions
from concord.training.options.schedule import ScheduleOptions
from concord.training.options.train import RUNTIME_OPTIONS, TrainConfig, parallel_of

__all__ = [
    "RUNTIME_OPTIONS",
    "AggregatorOptions",
    "DataOptions",
    "ObjectiveOptions",
    "OptimizerOptions",
    "ParallelOptions",
    "RunConfig",
    "RunOptions",
    "ScheduleOptions",
    "TrainConfig",
    "parallel_of",
]
