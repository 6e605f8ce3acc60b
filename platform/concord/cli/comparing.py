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
    from concord.comparisons.plan import METHODS

    command = read_command("compare", job, rest, f"concord compare {words[0]}")
    if command.print_config:
        return print_options(job.name, command.options, as_json)
    if METHODS in command.tables:
        return _compare_methods(command, as_json)
    plan = _plan(command)
    from concord.comparisons.comparing import run_comparison  # imports Ray Tune, which takes seconds

    result = run_comparison(plan, command.words(without=_WHERE), info)
    if not as_json:
        _print(result)
    if result.failed:
        name, failure = next(iter(result.failed.items()))
        first = f"{name}: {failure.splitlines()[0]}"
        problem = f"{len(result.failed)} runs failed, the first of them {first}; the same command tries again"
        raise UnfinishedError(problem, result.as_json())
    return result.as_json() | {"figures": _figures(result)}


def _compare_methods(command: JobCommand, as_json: bool) -> Mapping[str, Any]:
    """Tune each method, show them side by side, and say which to take."""
    from concord.comparisons.methods import plan_methods

    plan = plan_methods(command.job, command.options, command.given)
    from concord.comparisons.tuning import run_methods, train_command  # imports Ray Tune, which takes seconds

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
    from concord.comparisons.comparing import command, where
    from concord.comparisons.plan import comparison_folder, comparison_name, comparisons_of
    from concord.comparisons.results import journal_of, kept_words, read_results, write_results, write_runs

    if not job.job.comparisons and not tables:
        return {}
    folder = comparison_folder(resolve(output) if ":/" in str(output) else output, comparison_name(job.name, name))
    words = kept_words(folder.path)
    place = ["--output", str(output), *(["--name", name] if name else [])]
    shown: dict[str, Any] = {}
    for each in tables or comparisons_of(job):
        asked = words.get(each, [])
        plan = planned(job, [each], [*asked, *place], f"concord compare {job.name}", check=False)
        result = read_results(plan, journal_of(plan), plan.kept.path)
        if results is not None and result.finished:
            write_runs(result, results)
        figures = write_results(result, plan.kept.path, info) if result.finished else {}
        shown[each] = result.as_json() | {"figures": figures}
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
    """The plan of these tables, see :func:`concord.comparisons.plan.make_plan`."""
    return _plan(read_command("compare", job, [*tables, *words], program), check=check)


def _plan(command: JobCommand, *, check: bool = True) -> Any:
    from concord.comparisons.plan import make_plan

    return make_plan(command.job, command.tables, command.options, command.given, check=check)


def _print(result: Any) -> None:
    for each in result.tables:
        table(*each.cells())
    for name, failure in result.failed.items():
        info(f"{name} failed: {failure.splitlines()[0]}")
    print(f"runs      {result.finished} finished, {len(result.failed)} failed")
    print(f"tables    {result.folder / 'tables'}")
    for name, path in _figures(result).items():
        print(f"figure    {name}: {path}")
    print(f"seconds   {result.seconds:.1f}")


def _figures(result: Any) -> dict[str, str]:
    found = {name: result.folder / "figures" / f"{name}.png" for t in result.tables for name in t.comparison.figures}
    return {name: str(path) for name, path in found.items() if path.exists()}
