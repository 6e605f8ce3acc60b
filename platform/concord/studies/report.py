"""The report of a job's groups of runs, from their records: its tables, its studies, and comparisons of studies."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.analysis.comparison_figures import best_runs_figure, mean_curves_figure, methods_figure
from concord.analysis.figures import save
from concord.analysis.spread import finite, median_and_range
from concord.analysis.study_figures import searches_figure
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.execution.lifecycle import Info
from concord.record import folder_of, read_record
from concord.storage import check_local_folder
from concord.studies.comparison_page import REPORT, comparison_page, methods_page
from concord.studies.comparison_plan import comparison_name, only_rows, plan_as_recorded
from concord.studies.comparison_run import ComparisonResult, read_comparison
from concord.studies.criterion import metric_on
from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS, comparisons_of
from concord.studies.leave_one_out import leave_one_out_as_recorded
from concord.studies.methods_result import compare_command, read_methods
from concord.studies.page import check_page_file
from concord.studies.proposals import Trial
from concord.studies.recommendation import MethodsResult
from concord.studies.results import StudyResult, read_studies, read_study, write_lines, write_results
from concord.studies.study_options import combined
from concord.table import Table
from concord.training import JobFile
from concord.training.comparison import curve

Keep = Callable[[str, Any], None]  # takes a figure, after its name
_BEST_TRIALS = "best trials (oracle)"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Report a job: its tables, as far as their runs exist; its studies, the choices of selections, methods over seeds,
    and a comparison of searches."""

    # fmt: off
    studies: tuple[str, ...] = ()
    """Names of the studies to report; by default all of the job's."""
    only_studies: bool = False
    """Leave out the job's own report and its tables."""
    best: int = 10
    """Number of best trials of each method to draw."""
    name: str | None = None
    """Name of the comparison whose tables are shown; by default the job's."""
    only: tuple[str, ...] = ()
    """Rows of the job's tables: names, or patterns such as 'ERM, *' (with quotes); by default all."""
    results: Path | None = None
    """Folder for the data of each table: one file a table, one JSON line a run."""
    html: Path | None = None
    """File for a page to hand on: the tables' answer, columns, data and commands in one HTML file."""
    output: Path = DEFAULT_OUTPUT
    """Folder for runs, studies and figures."""
    # fmt: on


def report_options(job: JobFile) -> type[Any]:
    """The options of a job's report, with those of the job's own."""
    own = job.job.report
    return ReportOptions if own is None else combined(own.options, ReportOptions)


def report_groups(
    job: JobFile, tables: Sequence[str], options: Any, info: Info
) -> tuple[dict[str, Any], list[str | Table]]:
    """Report and draw a job's groups from their records, without training; no names of tables take everything.

    Returns the JSON result, and the output for readers.
    """
    check_local_folder("--results", options.results)
    check_page_file(options.html)
    if METHODS in tables:
        return _report_methods(job, tables, options, info)
    own = None if options.only_studies or tables or options.only else job.job.report
    compared = {} if options.only_studies else _comparisons(job, tables, options, info)
    methods = None if tables or options.only else read_methods(job, options.output, options.name)
    reported: dict[str, Any] = {} if own is None else dict(own.make(options, info))
    if options.html is not None:
        _write_page(job, [each for each in compared.values() if each.finished], methods, options, info)
    studies = [] if tables or options.only else _studies(job.name, options)
    if own is None and not compared and not studies:
        again = f"{job.command('tune')} makes one"
        raise InputError(f"report: job {job.name} has no study in {options.output}; {again}")
    figures = dict(reported.pop("figures", {}))
    for comparison in compared.values():
        figures |= comparison.drawn
    finished = [write_results(each, info) for each in studies if each.finished]
    for study in finished:
        figures |= {f"{study.record['name']} {name}": path for name, path in study.drawn.items()}
    if finished:
        folder = options.output / "reports" / job.name

        def keep(name: str, figure: Any) -> None:
            figures[name] = str(save(figure, folder / f"{name.replace(' ', '-')}.png"))

        reported |= _methods(finished, keep) | _best_trials(finished, options.best, keep) | _searches(finished, keep)
    output: list[str | Table] = []
    for each in compared.values():
        output += [*each.tables, *each.answer()] if each.finished else []
    output += [] if methods is None else methods.output()
    output += [part for study in finished for part in study.output()]
    mappings = {name: value for name, value in reported.items() if isinstance(value, Mapping)} | {"figures": figures}
    output += [Table.nested(name, value) for name, value in mappings.items() if value]
    result = {"job": job.name, **reported, "figures": figures}
    if compared:
        result["tables"] = {name: each.as_json() for name, each in compared.items()}
    if studies:
        result["studies"] = [each.as_json() for each in finished]
    return result, output


def _comparisons(job: JobFile, tables: Sequence[str], options: Any, info: Info) -> dict[str, ComparisonResult]:
    """The job's tables, as far as their runs exist; ``info`` takes the commands that make the missing ones."""
    folder = folder_of(options.output, comparison_name(job.name, options.name), "comparison")
    record = read_record(folder, "comparison") or {}
    found = {}
    declared = [*comparisons_of(job)] if job.job.comparisons else []
    left_out = [LEAVE_ONE_OUT] if LEAVE_ONE_OUT in record.get("asked", {}) and not options.only else []
    plans = {}
    for name in tables or [*declared, *left_out]:
        if name == LEAVE_ONE_OUT:
            if options.only:
                raise InputError(f"--only {' '.join(options.only)}: {name} has no rows of the job; leave --only out")
            plans[name] = leave_one_out_as_recorded(job, record, options.output, options.name)
        else:
            plans[name] = plan_as_recorded(job, name, record, options.output, options.name)
    if options.only:
        chosen = only_rows({name: plan.tables[name] for name, plan in plans.items()}, options.only)
        plans = {name: plans[name].with_rows({name: table}, options.only) for name, table in chosen.items()}
    for name, plan in plans.items():
        result = read_comparison(plan)
        if result.finished:
            result = write_results(result, info)
            if options.results is not None:
                write_lines(result.tables[0].runs, options.results, job.name, name)
        found[name] = result
        if lost := sum(map(len, result.missing.values())):
            info(f"{name}: {lost} of {len(plan.runs[name])} runs are missing; {plan.command} makes them")
        for run, failure in result.failed.items():
            info(f"{run} failed: {failure.splitlines()[0]}")
    return found


def _report_methods(
    job: JobFile, tables: Sequence[str], options: Any, info: Info
) -> tuple[dict[str, Any], list[str | Table]]:
    """The report of the job's comparison of methods alone."""
    if len(tables) > 1:
        raise InputError(f"report {' '.join(tables)}: {METHODS} is not a table of the job; give it alone")
    if options.only:
        raise InputError(f"--only {' '.join(options.only)}: {METHODS} has no rows of the job; leave --only out")
    methods = read_methods(job, options.output, options.name)
    again = {} if options.name is None else {"name": options.name}
    if methods is None:
        command = job.command("compare", METHODS, options={**again, "output": options.output})
        raise InputError(f"{METHODS}: fewer than two methods have a result in {options.output}; {command} makes them")
    if options.results is not None:
        command = compare_command(job, methods, again)
        info(f"kept in {write_lines(methods.result_lines(command), options.results, job.name, METHODS)}")
    if options.html is not None:
        _write_page(job, [], methods, options, info)
    return {"job": job.name, "figures": {}, "tables": {METHODS: methods.as_json()}}, methods.output()


def _write_page(
    job: JobFile, results: Sequence[ComparisonResult], methods: MethodsResult | None, options: Any, info: Info
) -> None:
    """The page of the comparisons that are there, or of the methods (InputError if there is neither)."""
    if results:
        page = comparison_page(results, info)
    elif methods is not None:
        name = {} if options.name is None else {"name": options.name}
        page = methods_page(job, methods, compare_command(job, methods, {**name, "html": REPORT}), info)
    else:
        option, table = {"html": options.html}, [] if job.job.comparisons else [LEAVE_ONE_OUT]
        again = f"{job.command('compare', *table, options=option)} makes one"
        if job.job.loop is None:
            again += f", {job.command('compare', METHODS, options=option)} one of methods"
        raise InputError(f"--html {options.html}: no comparison of job {job.name} is in {options.output}; {again}")
    page.write(options.html)
    info(f"page {options.html}")


def _studies(job: str, options: Any) -> list[StudyResult]:
    """The named studies, or all of the job's, oldest first."""
    if options.studies:
        results = [read_study(folder_of(options.output, name, "study")) for name in options.studies]
        for result in results:
            name, of = result.record["name"], result.record["job"]
            if of != job:
                raise InputError(f"--studies {name}: is a study of job {of}, not of {job}")
        return results
    return read_studies(options.output, job)


def _methods(results: Sequence[StudyResult], keep: Keep) -> dict[str, Any]:
    """Every method over the seeds of its newest study with new seeds of the best trial, all by one measure."""
    methods = {}
    measure = results[-1].reported_measure
    for result in results:
        runs = {split: result.over_seeds(split, measure) for split in ("train", "ood")}
        if len(result.reruns) > 1 and all(runs.values()):
            methods[result.method + " (oracle)" * bool(result.record["oracle"])] = runs
    if not methods:
        return {}
    keep("methods", methods_figure(methods, measure))
    return {
        "methods": {
            name: {split: median_and_range(values) for split, values in runs.items()} for name, runs in methods.items()
        }
    }


def _best_trials(results: Sequence[StudyResult], most: int, keep: Keep) -> dict[str, Any]:
    """The best trials of each method by their best value on the test (an oracle), if reported."""
    measure, largest = results[-1].reported_measure, results[-1].reported_mode == "max"
    metrics = {split: metric_on(split, measure) for split in ("train", "ood")}

    def top(run: Trial) -> float:
        return (max if largest else min)(finite(at.metrics[metrics["ood"]] for at in run.history))

    found: dict[str, list[Trial]] = {}
    for result in results:
        reporting = [each for each in result.ended if set(metrics.values()) <= each.metrics.keys()]
        if valued := [each for each in reporting if finite(at.metrics[metrics["ood"]] for at in each.history)]:
            found.setdefault(result.method, []).extend(valued)
    if len(found) < 2:
        return {}
    best = {method: sorted(runs, key=top, reverse=largest)[:most] for method, runs in found.items()}
    values = {method: [top(run) for run in runs] for method, runs in best.items()}
    keep("best-runs", best_runs_figure(values, f"best test {measure} (oracle)"))
    panels = {
        title: {method: [curve(run.history, metrics[split]) for run in runs] for method, runs in best.items()}
        for title, split in (("training", "train"), ("test", "ood"))
    }
    keep("curves", mean_curves_figure(panels, f"{measure}, {_BEST_TRIALS}"))
    shown = {method: {f"test {measure}": median_and_range(each, "trials")} for method, each in values.items()}
    return {_BEST_TRIALS: shown}


def _searches(results: Sequence[StudyResult], keep: Keep) -> dict[str, Any]:
    """The best values of studies that differ only in search and seed, by method and search."""
    groups: dict[str, list[StudyResult]] = {}
    for result in results:
        deciding = result.record["deciding"]
        same = {name: value for name, value in deciding.items() if name not in ("search", "startup", "seed")}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(result)
    shown: dict[str, Any] = {}
    for group in groups.values():
        values: dict[str, list[list[float]]] = {}  # by search, of each study the trials in the order of their ends
        criterion = group[0].criterion
        name = group[0].method + " (oracle)" * criterion.oracle
        for result in group:
            if each := finite(run.metrics.get(criterion.metric, math.nan) for run in result.ended):
                values.setdefault(result.record["deciding"]["search"], []).append(each)
        if len(values) > 1:
            name = name if name not in shown else f"{name}-{len(shown) + 1}"
            best: Callable[[list[float]], float] = max if criterion.mode == "max" else min
            shown[name] = {search: median_and_range([*map(best, found)]) for search, found in values.items()}
            keep(f"searches {name}", searches_figure(values, criterion.shown, criterion.mode))
    return {"searches": shown} if shown else {}
