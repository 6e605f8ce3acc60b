"""The options that every training run has, in groups; a job adds its own by deriving from :class:`TrainConfig`."""

from concord.training.options.aggregator_options import AggregatorOptions
from concord.training.options.objective_options import ObjectiveOptions
from concord.training.options.option_groups import (
    DataOptions,
    Device,
    LeftOut,
    OptimizerOptions,
    ScheduleOptions,
    as_names,
    in_short,
    spread,
)
from concord.training.options.run_options import LOCAL, MODEL_NAMES, ResolvedConfig, RunConfig, is_model_name
from concord.training.options.train_config import (
    ASK_FOR_A_MASK,
    ResolvedTrainConfig,
    TrainConfig,
    device_of,
    parallel_of,
)

__all__ = [
    "ASK_FOR_A_MASK",
    "LOCAL",
    "MODEL_NAMES",
    "AggregatorOptions",
    "DataOptions",
    "Device",
    "LeftOut",
    "ObjectiveOptions",
    "OptimizerOptions",
    "ResolvedConfig",
    "ResolvedTrainConfig",
    "RunConfig",
    "ScheduleOptions",
    "TrainConfig",
    "as_names",
    "device_of",
    "in_short",
    "is_model_name",
    "parallel_of",
    "spread",
]
