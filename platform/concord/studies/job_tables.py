"""The tables that a job declares, and the names that stand for tables of every job."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from concord.errors import InputError
from concord.options import did_you_mean
from concord.source_file import read_source, run_source
from concord.training.comparison import Comparison
from concord.training.job import JobFile

METHODS = "methods"  # instead of a table's name: a study of each method
LEAVE_ONE_OUT = "leave-one-out"  # a table that every job has: each method without each environment


def comparisons_of(job: JobFile, asked: Sequence[str] = ()) -> Mapping[str, Comparison]:
    """The tables of a job, from its file or from the one beside it that it names; all that are asked for are there."""
    named = job.job.comparisons
    found: Mapping[str, Comparison] = _beside(job, named) if isinstance(named, str) else named
    for name, makes in ((METHODS, "tunes each method"), (LEAVE_ONE_OUT, "leaves out each environment")):
        if name in found:
            raise InputError(f"job {job.name}: table {name}: compare JOB {name} {makes}; rename the table")
    every = (*found, METHODS, LEAVE_ONE_OUT)
    for table in asked:
        near = did_you_mean(table, every) or (f"; there are {', '.join(every)}" if found else "")
        if table not in found and near:
            raise InputError(f"table {table}: job {job.name} has no such table{near}")
    if not found:
        raise InputError(
            f"job {job.name}: has no tables to compare; give it comparisons={{…}}, or compare methods with "
            f"{job.command('compare', METHODS)}, or {LEAVE_ONE_OUT}"
        )
    return found


def _beside(job: JobFile, name: str) -> Mapping[str, Comparison]:
    """The variable ``comparisons`` of this file, whose path is relative to the job's."""
    path = Path(job.path).parent / name

    def refusal(problem: str) -> InputError:
        return InputError(f"job {job.path}: comparisons {name}: {problem}")

    found = getattr(run_source(str(path), read_source(path, refusal), "tables", refusal), "comparisons", None)
    if not isinstance(found, Mapping) or not all(isinstance(each, Comparison) for each in found.values()):
        raise refusal("needs comparisons = {…}, which maps the names of tables to Comparison(…)")
    return found
