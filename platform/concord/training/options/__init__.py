"""The options that every training run has, in groups; a job adds its own by deriving from :class:`TrainConfig`."""

from concord.training.options.aggregator_options import AggregatorOptions
from concord.training.options.data_options import DataOptions
from concord.training.options.objective_options import ObjectiveOptions
from concord.training.options.optimizer_options import OptimizerOptions
from concord.training.options.parallel_options import ParallelOptions
from concord.training.options.run_options import RunConfig, RunOptions
from concord.training.options.schedule_options import ScheduleOptions
from concord.training.options.train_config import RUNTIME_OPTIONS, TrainConfig, parallel_of

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
