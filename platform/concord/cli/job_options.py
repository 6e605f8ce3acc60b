"""The options of those commands that take a job: they depend on it."""

from collections.abc import Sequence
from typing import Any

from concord.errors import InputError

JOB_COMMANDS = ("train", "tune", "compare", "analyze", "report", "data")


def default_options(command: str, job: Any, reference: str, tables: Sequence[str] = ()) -> Any:
    """The options of a command with this job, an instance with their defaults.

    Args:
        command: one of ``JOB_COMMANDS``.
        job: the job with its file.
        reference: as the user called it.
        tables: that ``compare`` names.

    Raises:
        InputError: the command can do nothing with this job.
    """
    from concord.cli.analyze import AnalyzeOptions
    from concord.options import defaults_of
    from concord.studies.comparison_plan import METHODS, comparisons_of
    from concord.studies.methods import methods_options_for
    from concord.studies.options import combined, compare_options_for, options_for
    from concord.studies.report import StudyReport

    match command:
        case "train":
            return job.job.config
        case "tune":
            return options_for(job.job.config, list(job.job.studies))
        case "compare" if METHODS in tables:
            if len(tables) > 1:
                raise InputError(f"compare {reference} {' '.join(tables)}: {METHODS} is no table; give it alone")
            return methods_options_for(job)
        case "compare":
            comparisons_of(job)  # which refuses a job without any
            return compare_options_for(job.job.config)
        case "analyze" if job.job.loop is not None:
            raise InputError(f"analyze {reference}: this job trains in a way of its own; it has no losses to analyze")
        case "analyze":
            return AnalyzeOptions()
        case "report":
            own = job.job.report
            return defaults_of(StudyReport if own is None else combined(own.options, StudyReport))
        case _:
            data = getattr(job.job, "data", None)
            if data is None:
                raise InputError(f"data {reference}: this job reads data that are there, or makes its own when it runs")
            return defaults_of(data.options)
