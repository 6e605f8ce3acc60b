"""How long the trainings of a comparison will take: announced before the first, and asked about if it is long."""

import sys

from concord.errors import InputError, RunFailedError, first_line
from concord.execution.execute import only_process
from concord.execution.lifecycle import Info
from concord.execution.progress import duration
from concord.training import JobFile
from concord.training.loop import estimated_seconds
from concord.training.options import ResolvedTrainConfig

HOURS = 1.0  # of trainings that begin without a question
BESIDE_STEPS = 0.7
"""Seconds of a run beside its steps, for its record, MLflow and evaluations: 24 runs of a small table, two at a time on
two cores, took 1.1 s each, .3 of them for the steps."""
_LONG_SECONDS = 600.0


def require_time(
    job: JobFile,
    first: ResolvedTrainConfig,
    left: int,
    trainings: str,
    concurrent: int,
    hours: float,
    info: Info,
    first_look: str = "",
) -> None:
    """Announce the trainings that are left and about how long they take; if long, with the options for a first look.

    If they surely take more than these hours, also where patience ends each as early as it can, ask on the terminal:
    RunFailedError if the answer is no, InputError where nobody can be asked.
    ``left`` is their number without baselines, which take seconds; ``first`` is the configuration of which a few steps
    are measured, and ``trainings`` names all in words.
    """
    trainings = f"{trainings}, {concurrent} at a time"
    if left == 0:
        info(trainings)
        return
    try:
        each = estimated_seconds(job.job, first, only_process(first))
    except Exception as error:  # the job's own code; its runs report it
        info(f"{trainings}; how long they take is unknown ({first_line(error)})")
        return
    shortest, longest = (left * (seconds + BESIDE_STEPS) / concurrent for seconds in each)
    length = f"about {duration(longest)}"
    if duration(shortest) != duration(longest):
        length = f"{duration(shortest)} to {duration(longest)}, as patience ends each training"
    hint = f"; for a first look: {first_look}" if first_look and longest > _LONG_SECONDS else ""
    info(f"{trainings}: {length}; the start of their processes comes on top{hint}")
    if shortest <= 3600 * hours:
        return
    limit = f"--hours {hours:g}: {trainings} are expected to take {length}"
    if not sys.stdin.isatty():
        enough = max(round(1.5 * shortest / 3600), 2)
        raise InputError(f"{limit}; give --hours {enough}, or fewer methods, seeds or folds")
    info(f"{limit}; go on? yes or no")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RunFailedError("nothing was trained; fewer methods, seeds or folds take less")
