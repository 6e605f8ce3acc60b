"""Tables of configurations × seeds: compare trains what they need, report reads what is there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from concord.cli.job_options import JobCommand, read_command
from concord.cli.output import info, table
from concord.cli.parsing import job_and_words
from concord.errors import UnfinishedError
from concord.storage import resolve

# The options that say where a comparison is and runs: what a later report of it is not told again.
_WHERE = ("output", "name", "tracking_uri", "address", "concurrent", "gpus_per_trial")


def compare(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Train what the tables need, and show them."""
    job, rest = job_and_words(words, "compare")
    from concord.cli.config_file import print_options
    from concord.studies.comparison_plan import METHODS

    command = read_command("compare", job, rest, f"concord compare {words[0]}")
    if command.print_config:
        return print_options(job.name, command.options, as_json)
    if METHODS in command.tables:
        return _compare_methods(command, as_json)
    plan = _plan(command)
    from concord.studies.comparison import run_comparison  # imports Ray Tune, which takes seconds

    result = run_comparison(plan, command.words(without=_WHERE), info)
    if not as_json:
        _print(result)
    if result.failed:
        name, failure = next(iter(result.failed.items()))
        first = f"{name}: {failure.splitlines()[0]}"
        problem = f"{len(result.failed)} runs failed, the first of them {first}; the same command tries again"
        raise UnfinishedError(problem, result.as_json())
    result_json: Mapping[str, Any] = result.as_json()
    return result_json


def _compare_methods(command: JobCommand, as_json: bool) -> Mapping[str, Any]:
    """Tune each method, show them side by side, and say which to take."""
    from concord.studies.methods import plan_methods, run_methods, train_command

    plan = plan_methods(command.job, command.options, command.given)
    result = run_methods(plan, command.words(), info)
    trained = train_command(plan, result)
    if not as_json:
        table(*result.cells())
        for line in result.lines():
            print(line)
        print(f"train it  {trained}")
        print(f"studies   {', '.join(study.record['name'] for study in result.studies.values())}")
        print(f"seconds   {result.seconds:.1f}")
    return result.as_json() | {"train": trained}


def report_comparisons(
    job: Any, tables: Sequence[str], output: Path, name: str | None, results: Path | None, as_json: bool
) -> Mapping[str, Any]:
    """Show the tables of a job as far as their runs are there; nothing is trained.

    Args:
        job: with its file.
        tables: their names; none takes all.
        output: the output folder.
        name: of the comparison; the job's if None.
        results: folder that is to keep what the tables are made of, too.
        as_json: whether tables are left out.

    Returns:
        What ``--json`` shows of them: nothing where the job has none.

    Raises:
        InputError: there is no such table.
    """
    from concord.record import read_record
    from concord.studies.comparison import command, read_results, where, write_results, write_runs
    from concord.studies.comparison_plan import comparison_name, comparisons_of
    from concord.studies.plan import group_folder

    if not job.job.comparisons and not tables:
        return {}
    kept_name = comparison_name(job.name, name)
    folder = group_folder("comparison", resolve(output) if ":/" in str(output) else output, kept_name)
    record = read_record(folder, "comparison")
    words: Mapping[str, list[str]] = record["tables"] if record else {}
    place = ["--output", str(output), *(["--name", name] if name else [])]
    shown: dict[str, Any] = {}
    for each in tables or comparisons_of(job):
        asked = words.get(each, [])
        plan = planned(job, [each], [*asked, *place], f"concord compare {job.name}", check=False)
        result = read_results(plan)
        if results is not None and result.finished:
            write_runs(result, results)
        if result.finished:
            result = write_results(result, info)
        shown[each] = result.as_json()
        if not as_json and result.finished:
            table(*result.tables[0].cells())
        lost = sum(map(len, result.missing.values()))
        if lost:
            made_by = command(plan, [*asked, *where(plan)])
            info(f"{each}: {lost} of {len(plan.runs[each])} runs are missing; {made_by} makes them")
        for run, failure in result.failed.items():
            info(f"{run} failed: {failure.splitlines()[0]}")
    return {
        "tables": shown,
        "figures": {name: path for each in shown.values() for name, path in each["figures"].items()},
    }


def planned(job: Any, tables: Sequence[str], words: Sequence[str], program: str, *, check: bool = True) -> Any:
    """The plan of these tables, see :func:`concord.studies.comparison_plan.plan_comparison`."""
    return _plan(read_command("compare", job, [*tables, *words], program), check=check)


def _plan(command: JobCommand, *, check: bool = True) -> Any:
    from concord.studies.comparison_plan import plan_comparison

    return plan_comparison(command.job, command.tables, command.options, command.given, check=check)


def _print(result: Any) -> None:
    for each in result.tables:
        table(*each.cells())
    for name, failure in result.failed.items():
        info(f"{name} failed: {failure.splitlines()[0]}")
    print(f"runs      {result.finished} finished, {len(result.failed)} failed")
    print(f"tables    {result.folder / 'tables'}")
    for name, path in result.figures.items():
        print(f"figure    {name}: {path}")
    print(f"seconds   {result.seconds:.1f}")
