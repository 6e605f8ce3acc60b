"""What a study found: the best trials, what each selection would have chosen, its figures."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from concord.analysis.figures import save
from concord.analysis.parameter_importance import missing_for_importance, parameter_importance
from concord.analysis.study_figures import (
    Axis,
    TrialPoint,
    history_figure,
    importance_figure,
    parallel_figure,
    slices_figure,
)
from concord.errors import RunFailedError
from concord.space import Choice, LogUniform, Space
from concord.storage import Folder
from concord.studies import journal as journals
from concord.studies.journal import TrialResult, TrialSpec
from concord.studies.options import SELECTIONS
from concord.studies.selection import Criterion, metric_on
from concord.tracking import Store

FIGURES, TABLE, SUMMARY = "figures", "best.csv", "summary.json"


@dataclass(frozen=True)
class Selected:
    """What one selection would have chosen.

    Attributes:
        selection: the selection; ``o.o.d. test (oracle)`` where it looks at the test.
        among: how many trials it could judge.
        trial: its choice.
        metrics: of that trial; with ``left_out_…`` where environments were left out for it.
    """

    selection: str
    among: int
    trial: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StudyResult:
    """A study as its folder has it.

    Attributes:
        kept: where the study is kept.
        record: what the study is, see :meth:`concord.studies.plan.Plan.record`.
        finished: the trials that did, best first.
        failed: those that failed.
        ended: the finished trials in the order of their ends.
        left_out: metrics of environments left out afterwards, by trial.
        reruns: the best trial with other seeds: seed to metrics.
        seconds: that this call took; 0 if it was only read.
    """

    kept: Folder
    record: Mapping[str, Any]
    finished: Sequence[tuple[TrialSpec, TrialResult]]
    failed: Sequence[tuple[TrialSpec, TrialResult]]
    ended: Sequence[tuple[TrialSpec, TrialResult]]
    left_out: Mapping[int, Mapping[str, float]]
    reruns: Mapping[int, Mapping[str, float]]
    seconds: float = 0.0
    criterion: Criterion = field(init=False)
    space: Space = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "criterion", Criterion(**self.record["criterion"]))
        object.__setattr__(self, "space", Space.from_json(self.record["identity"]["space"]))

    @property
    def folder(self) -> Path:
        """Where it is on this machine."""
        return self.kept.path

    @property
    def best(self) -> tuple[TrialSpec, TrialResult]:
        """The trial that the study's selection chooses."""
        return self.finished[0]

    @property
    def measure(self) -> str:
        """What is compared, without the examples it is taken on: ``accuracy``."""
        return str(self.record["measure"])

    @property
    def label(self) -> str:
        """The selection, marked where it looks at the test."""
        return _label(self.criterion)

    def metrics(self, task: TrialSpec, ended: TrialResult) -> dict[str, float]:
        """All metrics of a trial, with those of environments left out afterwards."""
        return {**ended.metrics, **self.left_out.get(task.trial, {})}

    def by_selection(self) -> list[Selected]:
        """What every selection would have chosen, among the trials that it can judge."""
        found = []
        alone = self.criterion.selection == "own"
        for selection in SELECTIONS:
            if alone != (selection == "own"):
                continue
            criterion = Criterion.of(selection, self.measure, self.criterion.mode)
            judged = [(t, replace(e, metrics=self.metrics(t, e))) for t, e in self.finished]
            ranked = criterion.ranked(judged)
            if selection == "validation" and not self.record["validation"]:
                continue  # the held-out examples under another name
            if ranked:
                task, ended = ranked[0]
                found.append(Selected(_label(criterion), len(ranked), task.trial, ended.metrics))
        return found

    def varied(self) -> list[str]:
        """The names of what was varied, switches too."""
        return list(dict.fromkeys(located.name for located in self.space.varied()))

    def table(self, top: int) -> tuple[list[str], list[list[str]]]:
        """The best trials in the form of Table 3 of the AND-mask paper: the metric, then what was varied.

        What was varied is shown as what it stood for, and with it what it decided: the aggregator of ``auto``.
        """
        names = [*self.varied(), *self._decided()]
        rows = []
        for task, ended in self.finished[:top]:
            used = {**task.point, **task.resolved}
            values = [_shown(used.get(name)) for name in names]
            value = ended.metrics.get(self.criterion.metric, math.nan)
            rows.append([f"{value:.4g}", *values, str(task.trial)])
        oracle = " (oracle)" if self.criterion.oracle else ""
        return [f"{self.criterion.metric}{oracle}", *names, "trial"], rows

    def _decided(self) -> list[str]:
        """The options that no trial chose and that differ between trials all the same."""
        names = dict.fromkeys(name for task, _ in self.finished for name in task.resolved)
        found: dict[str, list[Any]] = {name: [task.resolved.get(name) for task, _ in self.finished] for name in names}
        chosen = self.varied()
        return [name for name, values in found.items() if name not in chosen and len(set(values)) > 1]

    @property
    def registration(self) -> str | None:
        """What became of the best trial's model, in words; None if none was registered."""
        if not self.record.get("model"):
            return None
        if "champion" not in self.record:  # of a version that did not write it down
            return str(self.record["model"])
        became = "the champion now" if self.record["champion"] else "not the champion"
        return f"{self.record['model']}: {became} ({self.record['registration']})"

    def as_json(self) -> dict[str, Any]:
        """The contract of ``concord tune --json``."""
        best = None
        if self.finished:
            task, ended = self.best
            config = task.point | task.resolved
            best = {"trial": task.trial, "config": config, "metrics": self.metrics(task, ended)}
        return {
            "job": self.record["job"],
            "study": self.record["name"],
            "method": self.record["identity"]["method"],
            "finished": len(self.finished),
            "failed": len(self.failed),
            "seconds": round(self.seconds, 3),
            "selection": self.criterion.selection,
            "oracle": self.record["oracle"],
            "metric": self.criterion.metric,
            "mode": self.criterion.mode,
            "best": best,
            "selections": [
                {"selection": each.selection, "trial": each.trial, "among": each.among, "metrics": dict(each.metrics)}
                for each in self.by_selection()
            ],
            "reruns": [{"seed": seed, "metrics": dict(metrics)} for seed, metrics in self.reruns.items()],
            "run_id": self.record.get("run_id"),
            "model": self.record.get("model"),
            "champion": self.record.get("champion"),
            "artifacts": self.kept.display_path,
        }


def read_result(folder: Path) -> StudyResult:
    """The study in this folder.

    Raises:
        InputError: there is none.
    """
    return judged(journals.read_study(folder), journals.read(folder), Folder(folder))


def judged(record: Mapping[str, Any], journal: journals.Journal, kept: Folder) -> StudyResult:
    """What the journal of a study says."""
    trials = journal.finished("trial")
    ranked = Criterion(**record["criterion"]).ranked(trials)
    best = ranked[0][0].trial if ranked else None
    return StudyResult(
        kept=kept,
        record=record,
        finished=[*ranked, *(pair for pair in trials if pair not in ranked)],
        failed=[pair for pair in journal.results("trial") if pair[1].failure is not None],
        ended=trials,
        left_out={task.trial: ended.metrics for task, ended in journal.finished("left-out")},
        reruns={
            task.seed: ended.metrics
            for task, ended in sorted(journal.finished("seed"), key=lambda pair: pair[0].seed or 0)
            if task.trial == best and task.seed is not None
        },
    )


def write_results(result: StudyResult, store: Store, run_id: str, info: Callable[[str], None]) -> None:
    """Draw the figures, write table and summary, and keep them with the study's run."""
    figures = draw(result, info)
    header, rows = result.table(int(result.record["options"]["top"]))
    lines = [",".join(header), *(",".join(row) for row in rows)]
    (result.folder / TABLE).write_text("\n".join(lines) + "\n")
    (result.folder / SUMMARY).write_text(json.dumps(result.as_json(), indent=1))
    task, ended = result.best
    try:
        for figure in figures:
            store.log_files(run_id, figure, FIGURES)
        for name in (TABLE, SUMMARY):
            store.log_files(run_id, result.folder / name)
        best = {f"best_{name}": value for name, value in result.metrics(task, ended).items()}
        store.log_metrics(run_id, best | {"finished": len(result.finished), "failed": len(result.failed)})
    except RunFailedError as error:
        info(f"the study's figures could not be kept in MLflow: {error}")


def draw(result: StudyResult, info: Callable[[str], None]) -> list[Path]:
    """The figures of a study, in its folder; for one that cannot be drawn, what it needs is said."""
    criterion = result.criterion
    points = [
        TrialPoint(task.trial, task.point, ended.metrics[criterion.metric])
        for task, ended in result.ended
        if math.isfinite(ended.metrics.get(criterion.metric, math.nan))
    ]
    axes = _axes(result.space, points)
    metric = criterion.metric + (" (oracle)" if criterion.oracle else "")
    drawn = {"history": history_figure(points, metric, criterion.mode)}
    if len(points) > 1:
        drawn["slices"] = slices_figure(points, axes, metric)
        drawn["parallel"] = parallel_figure(points, axes, metric, criterion.mode)
    else:
        info(f"no figures of slices and parallel coordinates: they need 2 finished trials, and there are {len(points)}")
    chosen, scores = [p.point for p in points], [p.value for p in points]
    if (missing := missing_for_importance(chosen, scores)) is not None:
        info(f"no figure of importances: {missing}")
    else:
        drawn["importance"] = importance_figure(parameter_importance(chosen, scores), metric)
    return [save(figure, result.folder / FIGURES / f"{name}.png") for name, figure in drawn.items()]


def _axes(space: Space, points: Sequence[TrialPoint]) -> list[Axis]:
    axes = []
    for name in dict.fromkeys(located.name for located in space.varied()):
        values = [point.point[name] for point in points if point.point.get(name) is not None]
        if not values:
            continue
        domains = [located.domain for located in space.varied() if located.name == name]
        if all(isinstance(domain, Choice) for domain in domains):
            order = dict.fromkeys(value for domain in domains if isinstance(domain, Choice) for value in domain.values)
            kinds = list(order)
            with contextlib.suppress(TypeError):
                kinds = sorted(order)  # type: ignore[type-var]
            axes.append(Axis(name, False, tuple(kinds)))
        else:
            axes.append(Axis(name, any(isinstance(domain, LogUniform) for domain in domains), None))
    return axes


def _label(criterion: Criterion) -> str:
    return "o.o.d. test (oracle)" if criterion.oracle else criterion.selection


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def selections_table(result: StudyResult) -> tuple[list[str], list[list[str]]]:
    """What every selection would have chosen, side by side."""
    own = result.criterion.selection == "own"
    splits = [""] if own else ["held_out", *(["validation"] if result.record["validation"] else []), "left_out", "ood"]
    rows = [
        [
            each.selection,
            str(each.among),
            str(each.trial),
            *(_shown(each.metrics.get(metric_on(split, result.measure))) for split in splits),
        ]
        for each in result.by_selection()
    ]
    return ["selected by", "among", "trial", *(f"{split} {result.measure}".strip() for split in splits)], rows
