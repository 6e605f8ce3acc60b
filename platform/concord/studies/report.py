"""The studies of a job side by side: figures drawn anew, methods over seeds, searches against each other."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.analysis.cloning_figures import best_runs_figure, mean_curves_figure
from concord.analysis.figures import save
from concord.analysis.spread import finite, median_and_range
from concord.analysis.study_figures import methods_figure, searches_figure
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.record import RECORD
from concord.storage import Folder
from concord.studies.plan import group_folder
from concord.studies.proposals import EndedRun
from concord.studies.results import StudyResult, draw, read_result
from concord.studies.selection import metric_on


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """The studies of a job: best trials, what each selection chooses, methods over seeds, searches compared."""

    # fmt: off
    studies: tuple[str, ...] = ()
    """Names of the studies to report; all of the job's if none is given."""
    only_studies: bool = False
    """Leave out what the job itself reports, and its tables."""
    best: int = 10
    """How many of the best trials of each method are drawn side by side."""
    name: str | None = None
    """Name of the comparison whose tables are shown; the job's if not given."""
    results: Path | None = None
    """Folder in which to keep what each table is made of, too: a file a table, a JSON line a run."""
    output: Path = DEFAULT_OUTPUT
    """Folder for runs, studies and figures."""
    # fmt: on


def report_studies(
    job: str, options: StudyReport, info: Callable[[str], None]
) -> tuple[list[StudyResult], dict[str, Any]]:
    """Read the studies and draw their figures.

    Returns:
        The studies, oldest first, and what ``--json`` shows of them; nothing of either if there are none.

    Raises:
        InputError: a study that is asked for is not there, or is another job's.
    """
    results = _results(job, options)
    if not results:
        return [], {}
    figures: dict[str, str] = {}
    folder, measure = options.output / "reports" / job, results[-1].measure

    def keep(name: str, figure: Any) -> None:
        figures[name] = str(save(figure, folder / f"{name.replace(' ', '-')}.png"))

    for result in results:
        if result.finished:
            criterion, name = result.criterion, result.record["name"]
            judged = f"judged by {criterion.metric}, {criterion.direction}"
            info(f"study {name}: {len(result.finished)} trials, {judged}")
            figures |= {f"{name} {path.stem}": str(path) for path in draw(result, info)}
    shown: dict[str, Any] = {"studies": [result.as_json() for result in results if result.finished]}
    if methods := method_runs(results):
        shown["methods"] = {
            name: {split: median_and_range(runs[split]) for split in runs} for name, runs in methods.items()
        }
        keep("methods", methods_figure(methods, measure))
    best = best_trials(results, options.best)
    if len(best) > 1:
        values = {method: each.values for method, each in best.items()}
        shown["best trials"] = {
            method: {f"test {measure}": median_and_range(each, "trials")} for method, each in values.items()
        }
        keep("best-runs", best_runs_figure(values, f"best test {measure}"))
        panels = {
            title: {method: each.curves[split] for method, each in best.items()}
            for title, split in (("training", "train"), ("test", "ood"))
        }
        keep("curves", mean_curves_figure(panels, measure))
    for name, searches in compared_searches(results).items():
        of, mode = max if searches.mode == "max" else min, searches.mode
        reached = {
            search: median_and_range([of(values) for values in found]) for search, found in searches.values.items()
        }
        shown.setdefault("searches", {})[name] = reached
        keep(f"searches {name}", searches_figure(searches.values, searches.metric, mode))
    return results, {**shown, "figures": figures}


def method_runs(results: Sequence[StudyResult]) -> dict[str, dict[str, list[float]]]:
    """Accuracy (or loss) over seeds of the newest study of every method that was run again with several seeds."""
    found = {}
    for result in results:
        runs = {split: result.over_seeds(split) for split in ("train", "ood")}
        if len(result.reruns) > 1 and all(len(values) == len(result.reruns) for values in runs.values()):
            found[result.method] = runs
    return found


@dataclass(frozen=True)
class BestTrials:
    """The best trials of a method's studies by the best moment of each on the test, an oracle.

    Attributes:
        values: their best values, the best first.
        curves: of each, by split, as ``(fraction of the run, value)``.
    """

    values: Sequence[float]
    curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]]


def best_trials(results: Sequence[StudyResult], most: int) -> dict[str, BestTrials]:
    """This many of each method, by the measure of the newest study; nothing where its trials do not report it."""
    measure, largest = results[-1].measure, results[-1].criterion.mode == "max"
    metrics = {split: metric_on(split, measure) for split in ("train", "ood")}

    def top(run: EndedRun) -> float:
        return (max if largest else min)(at.metrics[metrics["ood"]] for at in run.history)

    found: dict[str, list[EndedRun]] = {}
    for result in results:
        if there := [each for each in result.ended if set(metrics.values()) <= each.metrics.keys()]:
            found.setdefault(result.method, []).extend(there)
    best = {}
    for method, runs in found.items():
        chosen = sorted(runs, key=top, reverse=largest)[:most]
        curves = {
            split: [[(at.epoch / run.history[-1].epoch, at.metrics[metric]) for at in run.history] for run in chosen]
            for split, metric in metrics.items()
        }
        best[method] = BestTrials([top(run) for run in chosen], curves)
    return best


@dataclass(frozen=True)
class ComparedSearches:
    """Studies that differ in nothing but search and seed.

    Attributes:
        metric, mode: what they are judged by.
        values: by search, each study's values in the order of the trials' ends.
    """

    metric: str
    mode: Any
    values: Mapping[str, list[list[float]]]


def compared_searches(results: Sequence[StudyResult]) -> dict[str, ComparedSearches]:
    """The groups of studies with more than one search, by method."""
    groups: dict[str, list[StudyResult]] = {}
    for result in results:
        identity = result.record["identity"]
        config = {name: value for name, value in identity["config"].items() if name != "seed"}
        same = {name: identity[name] for name in identity if name not in ("search", "startup")} | {"config": config}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(result)
    found: dict[str, ComparedSearches] = {}
    for group in groups.values():
        values: dict[str, list[list[float]]] = {}
        criterion, name = group[0].criterion, group[0].method
        for result in group:
            if each := finite(run.metrics.get(criterion.metric, math.nan) for run in result.ended):
                values.setdefault(result.record["identity"]["search"], []).append(each)
        if len(values) > 1:
            name = name if name not in found else f"{name}-{len(found) + 1}"
            found[name] = ComparedSearches(criterion.metric, criterion.mode, values)
    return found


def _results(job: str, options: StudyReport) -> list[StudyResult]:
    folder = group_folder("study", options.output, "any").place.parent
    if options.studies:
        results = [read_result(group_folder("study", options.output, name)) for name in options.studies]
        for result in results:
            if result.record["job"] != job:
                raise InputError(
                    f"--studies {result.record['name']}: is a study of job {result.record['job']}, not of {job}"
                )
        return results
    there = [read_result(Folder(path.parent)) for path in folder.glob(f"*/{RECORD}")]
    return sorted((each for each in there if each.record["job"] == job), key=lambda each: each.record["started"])
