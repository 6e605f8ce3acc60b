"""The studies of a job side by side: figures drawn anew, methods over seeds, searches against each other."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from concord.analysis.cloning_figures import best_runs_figure, mean_curves_figure
from concord.analysis.figures import save
from concord.analysis.study_figures import methods_figure, searches_figure
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.studies.journal import STUDY, TrialResult, read_study
from concord.studies.plan import studies_folder
from concord.studies.results import StudyResult, draw, read_result
from concord.studies.selection import metric_on
from concord.training import TrainConfig

Config = TypeVar("Config", bound=TrainConfig)


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
    for result in results:
        if result.finished:
            criterion = result.criterion
            judged = f"judged by {criterion.metric}, {criterion.direction}"
            info(f"study {result.record['name']}: {len(result.finished)} trials, {judged}")
            for path in draw(result, info):
                figures[f"{result.record['name']} {path.stem}"] = str(path)
    folder = options.output / "reports" / job
    shown: dict[str, Any] = {"studies": [result.as_json() for result in results if result.finished]}
    methods = method_runs(results)
    if methods:
        measure = results[-1].measure
        shown["methods"] = {name: {split: _spread(runs[split]) for split in runs} for name, runs in methods.items()}
        figures["methods"] = str(save(methods_figure(methods, measure), folder / "methods.png"))
    best = best_trials(results, options.best)
    if len(best) > 1:
        measure = results[-1].measure
        shown["best trials"] = {
            method: {f"test {measure}": _spread(each.values, "trials")} for method, each in best.items()
        }
        minima = best_runs_figure({method: each.values for method, each in best.items()}, f"best test {measure}")
        figures["best-runs"] = str(save(minima, folder / "best-runs.png"))
        panels = {
            title: {method: each.curves[split] for method, each in best.items()}
            for title, split in (("training", "train"), ("test", "ood"))
        }
        figures["curves"] = str(save(mean_curves_figure(panels, measure), folder / "curves.png"))
    for name, searches in compared_searches(results).items():
        reached = {
            search: [_best(values, searches.mode) for values in found] for search, found in searches.values.items()
        }
        shown.setdefault("searches", {})[name] = {search: _spread(values) for search, values in reached.items()}
        drawn = searches_figure(searches.values, searches.metric, searches.mode)
        figures[f"searches {name}"] = str(save(drawn, folder / f"searches-{name}.png"))
    shown["figures"] = figures
    return results, shown


def method_runs(results: Sequence[StudyResult]) -> dict[str, dict[str, list[float]]]:
    """Accuracy (or loss) over seeds of the newest study of every method that was run again with several seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for result in results:
        if len(result.reruns) < 2:
            continue
        splits = {
            split: [metrics[metric_on(split, result.measure)] for metrics in result.reruns.values()]
            for split in ("train", "ood")
            if all(metric_on(split, result.measure) in metrics for metrics in result.reruns.values())
        }
        if len(splits) == 2:
            found[result.record["identity"]["method"]] = splits
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
    """So many of each method, by the measure of the newest study; nothing where its trials do not report it."""
    measure, mode = results[-1].measure, results[-1].criterion.mode
    metrics = {split: metric_on(split, measure) for split in ("train", "ood")}
    found: dict[str, list[TrialResult]] = {}
    for result in results:
        there = [e for _, e in result.ended if e.history and all(m in e.metrics for m in metrics.values())]
        if there:
            found.setdefault(result.record["identity"]["method"], []).extend(there)
    best: dict[str, BestTrials] = {}
    for method, trials in found.items():
        tops = [_best([at[metrics["ood"]] for _, _, at in trial.history], mode) for trial in trials]
        order = sorted(range(len(trials)), key=lambda index: tops[index], reverse=mode == "max")[:most]
        curves = {
            split: [
                [(epoch / trials[index].history[-1][0], at[metric]) for epoch, _, at in trials[index].history]
                for index in order
            ]
            for split, metric in metrics.items()
        }
        best[method] = BestTrials([tops[index] for index in order], curves)
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
        identity = dict(result.record["identity"])
        config = {name: value for name, value in identity["config"].items() if name != "seed"}
        same = {name: identity[name] for name in identity if name not in ("search", "startup")} | {"config": config}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(result)
    found: dict[str, ComparedSearches] = {}
    for group in groups.values():
        values: dict[str, list[list[float]]] = {}
        for result in group:
            metric = result.criterion.metric
            each = [e.metrics[metric] for _, e in result.ended if math.isfinite(e.metrics.get(metric, math.nan))]
            if each:
                values.setdefault(result.record["identity"]["search"], []).append(each)
        if len(values) > 1:
            name = group[0].record["identity"]["method"]
            name = name if name not in found else f"{name}-{len(found) + 1}"
            found[name] = ComparedSearches(group[0].criterion.metric, group[0].criterion.mode, values)
    return found


def _results(job: str, options: StudyReport) -> list[StudyResult]:
    folder = studies_folder(options.output)
    if options.studies:
        results = [read_result(folder / name) for name in options.studies]
        for result in results:
            if result.record["job"] != job:
                raise InputError(
                    f"--studies {result.record['name']}: is a study of job {result.record['job']}, not of {job}"
                )
    else:
        there = sorted(folder.glob(f"*/{STUDY}"), key=lambda path: read_study(path.parent).get("started", 0.0))
        results = [read_result(path.parent) for path in there if read_study(path.parent)["job"] == job]
    return results


def _best(values: Sequence[float], mode: str) -> float:
    return max(values) if mode == "max" else min(values)


def _spread(values: Sequence[float], of: str = "seeds") -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "largest": max(values), of: len(values)}
