"""Training: jobs and their options, the loop, evaluation, checkpoints; neither Ray nor MLflow."""

from concord.training.comparison import Column, Comparison, FinishedRun, Runs
from concord.training.evaluation import EnvironmentEvaluation, Measure, correct
from concord.training.job import CustomJob, Data, Job, JobFile, Report, Study, TrialLoop, load_job
from concord.training.loop import ProcessContext, Reporter, build_model, share, train
from concord.training.options import RunConfig, TrainConfig
from concord.training.outcome import Evaluation, Outcome

__all__ = [
    "Column",
    "Comparison",
    "CustomJob",
    "Data",
    "EnvironmentEvaluation",
    "Evaluation",
    "FinishedRun",
    "Job",
    "JobFile",
    "Measure",
    "Outcome",
    "ProcessContext",
    "Report",
    "Reporter",
    "RunConfig",
    "Runs",
    "Study",
    "TrainConfig",
    "TrialLoop",
    "build_model",
    "correct",
    "load_job",
    "share",
    "train",
]
