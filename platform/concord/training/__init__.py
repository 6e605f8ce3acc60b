"""Training: jobs and their options, the loop, evaluation, checkpoints; neither Ray nor MLflow.

A name that needs PyTorch is imported when it is used, so that a job's file is read without.
"""

from typing import TYPE_CHECKING

from concord.lazy_names import lazy_names
from concord.record import Evaluation, Run
from concord.training.comparison import Column, Comparison, Runs
from concord.training.declared_measures import EnvironmentEvaluation, Measure
from concord.training.job import Data, Job, JobFile, Loop, Report, Study, load_job
from concord.training.options import RunConfig, TrainConfig

if TYPE_CHECKING:
    from concord.training.build import build_model
    from concord.training.context import ProcessContext, RunContext, Silent
    from concord.training.evaluation import correct
    from concord.training.loop import train
    from concord.training.worker_data import share

__all__ = [
    "Column",
    "Comparison",
    "Data",
    "EnvironmentEvaluation",
    "Evaluation",
    "Job",
    "JobFile",
    "Loop",
    "Measure",
    "ProcessContext",
    "Report",
    "Run",
    "RunConfig",
    "RunContext",
    "Runs",
    "Silent",
    "Study",
    "TrainConfig",
    "build_model",
    "correct",
    "load_job",
    "share",
    "train",
]

__getattr__ = lazy_names(
    __name__,
    {
        "concord.training.build": ("build_model",),
        "concord.training.context": ("ProcessContext", "RunContext", "Silent"),
        "concord.training.evaluation": ("correct",),
        "concord.training.loop": ("train",),
        "concord.training.worker_data": ("share",),
    },
)
