"""The command ``compare``: the tables of a job, or the methods for its data."""

from collections.abc import Mapping, Sequence
from typing import Any

from concord.cli.job_options import JobCommand, read_command
from concord.cli.output import info, show
from concord.cli.parsing import job_and_words
from concord.errors import UnfinishedError


def compare(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Train the missing runs of tables, or tune each method, and show the result."""
    job, rest = job_and_words(words, "compare")
    from concord.cli.config_file import print_options
    from concord.studies.comparison_plan import METHODS

    command = read_command("compare", job, rest, f"concord compare {words[0]}")
    if command.print_config:
        return print_options(command.job, command.options, as_json)
    result = _methods(command) if METHODS in command.tables else _tables(command)
    if not as_json:
        show(result.output())
    shown: Mapping[str, Any] = result.as_json()
    if result.failed:
        name, failure = next(iter(result.failed.items()))
        what, again = ("methods", "") if METHODS in command.tables else ("runs", "; the same command tries again")
        first = f"{name}: {failure.splitlines()[0]}"
        raise UnfinishedError(f"failed {what}: {len(result.failed)}, the first of them {first}{again}", shown)
    return shown


def _tables(command: JobCommand) -> Any:
    from concord.studies.comparison_plan import LEAVE_ONE_OUT, plan_comparison
    from concord.studies.leave_one_out import plan_leave_one_out

    if LEAVE_ONE_OUT in command.tables:
        plan = plan_leave_one_out(command.job, command.options, command.given)
    else:
        plan = plan_comparison(command.job, command.tables, command.options, command.given)
    from concord.studies.comparison_run import run_comparison  # imports Ray Tune, which takes seconds
    from concord.studies.result_lines import write_lines

    result = run_comparison(plan, info)
    if (results := command.options.comparison.results) is not None:
        for table in result.tables:
            if table.runs:  # else rows that were kept earlier would be lost
                info(f"kept in {write_lines(table.runs, results, command.job.name, table.name)}")
    return result


def _methods(command: JobCommand) -> Any:
    from concord.studies.methods import plan_methods, run_methods

    return run_methods(plan_methods(command.job, command.options, command.given), command.words(), info)
