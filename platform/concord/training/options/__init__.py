"""The options that every training run has, in groups; a job adds its own by deriving from :class:`TrainConfig`."""

from concord.defaults import DEFAULT_OUTPUT
from concord.training.options.aggregation import AggregatorOption, AggregatorOptions, VectorizeOption
from concord.training.options.data import DataOptions
from concord.training.options.objective import (
    DANNOptions,
    EQRMOptions,
    FishrOptions,
    GroupDROOptions,
    IRMOptions,
    MetaIRMOptions,
    MixupOptions,
    ObjectiveOptions,
    PenaltyOptions,
    RepresentationOptions,
)
from concord.training.options.optimizer import OptimizerName, OptimizerOptions
from concord.training.options.parallel import ParallelOptions
from concord.training.options.run import RunConfig, RunOptions
from concord.training.options.schedule import ScheduleOptions
from concord.training.options.train import RUNTIME_OPTIONS, TrainConfig, parallel_of

__all__ = [
    "DEFAULT_OUTPUT",
    "RUNTIME_OPTIONS",
    "AggregatorOption",
    "AggregatorOptions",
    "DANNOptions",
    "DataOptions",
    "EQRMOptions",
    "FishrOptions",
    "GroupDROOptions",
    "IRMOptions",
    "MetaIRMOptions",
    "MixupOptions",
    "ObjectiveOptions",
    "OptimizerName",
    "OptimizerOptions",
    "ParallelOptions",
    "PenaltyOptions",
    "RepresentationOptions",
    "RunConfig",
    "RunOptions",
    "ScheduleOptions",
    "TrainConfig",
    "VectorizeOption",
    "parallel_of",
]
