"""Training: jobs and their options, the loop, evaluation, checkpoints; neither Ray nor MLflow."""

from concord.record import Evaluation, Run
from concord.training.comparison import Column, Comparison, Runs
from concord.training.context import ProcessContext, RunContext, Silent
from concord.training.evaluation import EnvironmentEvaluation, Measure, correct
from concord.training.job import Data, Job, JobFile, Loop, Report, Study, load_job
from concord.training.loop import build_model, train
from concord.training.options import RunConfig, TrainConfig
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
