"""The studies of a job side by side: figures drawn anew, methods over seeds, searches against each other."""

import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from concord.analysis.figures import save
from concord.analysis.study_figures import methods_figure, searches_figure
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.options import option_values
from concord.runs.folder import restored_config
from concord.studies.journal import STUDY, read_study
from concord.studies.plan import studies_folder
from concord.studies.results import StudyResult, draw, read_result
from concord.studies.selection import metric_on
from concord.studies.spaces import config_at
from concord.training import TrainConfig
from concord.training.options import RUNTIME_OPTIONS
from concord.training.outcome import Evaluation

Config = TypeVar("Config", bound=TrainConfig)


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """The studies of a job: best trials, what each selection chooses, methods over seeds, searches compared."""

    # fmt: off
    studies: tuple[str, ...] = ()
    """Names of the studies to report; all of the job's if none is given."""
    only_studies: bool = False
    """Leave out what the job itself reports, and its tables."""
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
    for name, searches in compared_searches(results).items():
        best = {search: [_best(values, searches.mode) for values in found] for search, found in searches.values.items()}
        shown.setdefault("searches", {})[name] = {search: _spread(values) for search, values in best.items()}
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
class FinishedTrial(Generic[Config]):
    """A finished trial of a study.

    Attributes:
        config: its configuration.
        history: every evaluation of it.
        data: the version of the data, where they have one.
    """

    config: Config
    history: tuple[Evaluation, ...]
    data: str | None = None


def load_trials(job: str, config: Config, output: Path) -> list[FinishedTrial[Config]]:
    """The finished trials of all studies of a job, those of the oldest study first.

    Args:
        job: its name.
        config: its options, at their defaults.
        output: the folder with the studies.
    """
    found: list[FinishedTrial[Config]] = []
    for result in _results(job, StudyReport(output=output)):
        base = restored_config(config, result.record["config"])
        for task, ended in result.ended:
            history = tuple(Evaluation(*each) for each in ended.history)
            if history:
                data = result.record["identity"].get("data")
                config_then = config_at(base, result.space, task.point).resolved()
                found.append(FinishedTrial(config_then, history, data))
    return found


def comparable_trials(
    trials: Sequence[FinishedTrial[Config]], differing: Collection[str], **wanted: object
) -> list[FinishedTrial[Config]]:
    """The trials with the settings of the newest, so that like is compared with like.

    Args:
        trials: oldest first.
        differing: options in which they may differ, besides the seed and where and how a run runs.
        wanted: options that the newest has to have; None is any value.
    """
    wanted = {name: value for name, value in wanted.items() if value is not None}
    possible = [trial for trial in trials if wanted.items() <= option_values(trial.config).items()]
    ignored = {*differing, "seed", *RUNTIME_OPTIONS}

    def settings(trial: FinishedTrial[Config]) -> dict[str, object]:
        of_config = {name: value for name, value in option_values(trial.config).items() if name not in ignored}
        return {**of_config, "": trial.data}

    return [trial for trial in possible if settings(trial) == settings(possible[-1])]


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


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "largest": max(values), "seeds": len(values)}
