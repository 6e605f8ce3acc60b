"""Training: jobs and their options, the loop, evaluation, checkpoints; neither Ray nor MLflow."""

from concord.training.comparison import Column, Comparison, FinishedRun, Runs
from concord.training.context import ProcessContext, RunContext, Silent
from concord.training.evaluation import EnvironmentEvaluation, Evaluation, Measure, Outcome, correct
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
    "FinishedRun",
    "Job",
    "JobFile",
    "Loop",
    "Measure",
    "Outcome",
    "ProcessContext",
    "Report",
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
