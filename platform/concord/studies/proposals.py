"""The runs of a group: who proposes them, what became of them, and how far they are, from the runs' own records."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, cast

from concord.errors import InputError
from concord.execution.key import Key
from concord.execution.live_metrics import Metric, Sample
from concord.execution.progress import Progress, duration
from concord.execution.spec import RunSpec
from concord.record import EVENTS, RECORD, Evaluation, Run, folder_of, read_run
from concord.space import Point, frozen
from concord.studies.criterion import Criterion, TrialEvaluator, left_out_metrics
from concord.training.options import LeftOut

Kind = Literal["trial", "left-out", "seed", "cell"]
"""A trial of a search; the best trials with environments left out, or with another seed; a cell of a table."""


@dataclass(frozen=True)
class Trial:
    """A trial, or a repetition of one: a run on all environments, runs with one left out each, or both.

    Attributes:
        number: from 0.
        point: of the space.
        resolved: the values of options whose defaults follow from others, such as ``auto``.
        parts: its runs, by what is left out; None is the run on all environments.
    """

    kind: Kind
    number: int
    point: Point
    seed: int | None
    resolved: Point
    parts: Mapping[LeftOut, Run]
    evaluator: TrialEvaluator = field(repr=False)

    @property
    def run(self) -> Run | None:
        """The run on all environments; None if only folds were asked for."""
        return self.parts.get(None)

    @property
    def folds(self) -> list[Run]:
        """The runs that leave environments out."""
        return [run for left_out, run in self.parts.items() if left_out is not None]

    @property
    def runs(self) -> list[Run]:
        """All its runs, first the one on all environments."""
        return [*([] if self.run is None else [self.run]), *self.folds]

    @property
    def complete(self) -> bool:
        """Whether it is over: all its runs have ended, or one has failed."""
        ended = [each.status in ("FINISHED", "FAILED") for each in self.runs]
        return all(ended) or self.failure is not None

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics at the end, and those over the environments left out; empty if it failed."""
        if self.failure is not None:
            return {}
        found = {} if self.run is None else self.evaluator.metrics(self.run.metrics)
        return found | (left_out_metrics([each.metrics for each in self.folds], self.evaluator.modes))

    @property
    def history(self) -> list[Evaluation]:
        """The evaluations on all environments; of folds alone, their end."""
        if self.run is None:
            return [each.history[-1]._replace(metrics=self.metrics) for each in self.folds[-1:]]
        history = [each._replace(metrics=self.evaluator.metrics(each.metrics)) for each in self.run.history]
        return [*history[:-1], history[-1]._replace(metrics=self.metrics)] if self.folds and self.metrics else history

    @property
    def failure(self) -> str | None:
        """Why one of its runs failed; None if none did."""
        return next((each.failure for each in self.runs if each.failure is not None), None)

    @property
    def stopped(self) -> str | None:
        """Why it ended early; None if it did not."""
        return None if self.run is None else self.run.stopped

    @property
    def seconds(self) -> float:
        """The time of training of all its runs."""
        return sum(each.seconds for each in self.runs)

    @property
    def ended(self) -> float:
        """When it was over, in seconds since 1970."""
        return max((each.ended_at for each in self.runs if each.status is not None), default=math.inf)

    @property
    def origin(self) -> Mapping[str, str]:
        """Machine, commit and version of the data."""
        return dict(self.runs[0].record.get("origin", {}))

    @property
    def name(self) -> str:
        """The name of its first run."""
        return self.runs[0].name


class Proposer(Protocol):
    """Decides the runs of a pool, and is told how they ended. Called from one thread.

    Attributes:
        keep: whether a run that is there by its key is trained again if its last checkpoint is gone.
    """

    keep: bool

    def next(self) -> Sequence[RunSpec]:
        """The next runs, which belong together; none when there are no more now."""

    def ended(self, spec: RunSpec, run: Run) -> None:
        """A run is over."""

    def keep_above(self, spec: RunSpec) -> float:
        """The score from which the last checkpoint of a run is kept; infinity keeps none."""


class ProposalList:
    """Proposes these runs in turn, and reports each end to a function."""

    def __init__(
        self, runs: Sequence[RunSpec], tell: Callable[[RunSpec, Run], None] = lambda *_: None, keep: bool = False
    ) -> None:
        self._left, self.ended, self.keep = list(runs), tell, keep

    def next(self) -> Sequence[RunSpec]:
        """The next run."""
        return [self._left.pop(0)] if self._left else []

    def keep_above(self, spec: RunSpec) -> float:  # noqa: ARG002
        """The same for all."""
        return float("-inf" if self.keep else "inf")


class GroupRuns:
    """The runs that a group asked for, from its events and the runs' own records.

    Attributes:
        known: runs that are open, or were read.
    """

    def __init__(self, group: Run, evaluator: TrialEvaluator | None = None) -> None:
        self._group, self._evaluator = group, evaluator or TrialEvaluator()
        self.known: dict[str, Run] = {}

    def run(self, name: str) -> Run:
        """The run of this name; one that is not there has neither begun nor ended."""
        if name not in self.known:
            folder = folder_of(self._group.folder.place.parent.parent, name)
            self.known[name] = read_run(folder) or Run(folder)
        return self.known[name]

    def begun(self, kind: Kind) -> list[Trial]:
        """The trials of this kind, in the order in which they were asked for."""
        places: dict[tuple[int, int | None], dict[LeftOut, Mapping[str, Any]]] = {}
        made_for: dict[str, Mapping[str, Any]] = {}  # by run; later requests may differ in options without an effect
        for place in self._group.asked:
            made_for.setdefault(place["run"], place)
            if place["kind"] == kind:
                parts_of = places.setdefault((place["trial"], place.get("seed")), {})
                parts_of[cast(LeftOut, frozen(place.get("left_out")))] = place
        found = []
        for (number, seed), asked in places.items():
            first = next(iter(asked.values()))
            point, resolved = (
                {name: frozen(value) for name, value in first.get(part, {}).items()} for part in ("point", "resolved")
            )
            parts = {left_out: self._asked(place) for left_out, place in asked.items()}
            for left_out, place in asked.items():
                run = parts[left_out]
                if (
                    place is made_for[run.name]
                    and run.record.get("group") == self._group.name
                    and run.key == place["key"]
                ):
                    self._require_options(place, run)
            found.append(Trial(kind, number, point, seed, resolved, parts, self._evaluator))
        return found

    def ended(self, kind: Kind) -> list[Trial]:
        """The trials that are over, in the order of their ends."""
        return sorted((each for each in self.begun(kind) if each.complete), key=lambda each: each.ended)

    def finished(self, kind: Kind) -> list[Trial]:
        """The ended trials that did not fail."""
        return [each for each in self.ended(kind) if each.failure is None]

    def by_key(self, key: Key) -> Run | None:
        """The latest run with this key; with only the part without data, if the key does not say which."""
        place = self._by_key.get(key.value)
        return None if place is None else self._asked(place)

    @cached_property
    def _by_key(self) -> Mapping[str, Mapping[str, Any]]:
        """The latest request by its key, and by the part of the key without data."""
        found: dict[str, Mapping[str, Any]] = {}
        for place in self._group.asked:
            found |= dict.fromkeys((place["key"], place["key"].partition("-")[0]), place)
        return found

    def _asked(self, place: Mapping[str, Any]) -> Run:
        """The run of a request, which has its key unless the group itself is to train it anew (InputError)."""
        run = self.run(place["run"])
        if run.record and run.record.get("group") != self._group.name and run.key != place["key"]:
            raise self._contradiction(run, f"of key {place['key']}", f"key {run.key or None}")
        return run

    def _require_options(self, place: Mapping[str, Any], run: Run) -> None:
        """Refuse a request whose options are not those of its run, which was made for it (InputError)."""
        group = self._group
        wanted = {name: group.options[name] for name in ("seed", "leave_out") if name in group.options}
        wanted |= {**place["point"], **place.get("resolved", {})}
        for option, name in (("seed", "seed"), ("leave_out", "left_out")):
            wanted |= {} if place.get(name) is None else {option: place[name]}
        for name, value in wanted.items():
            if name in run.options and run.options[name] != frozen(value):
                raise self._contradiction(run, f"with {name} {value}", f"{name} {run.options[name]}")

    def _contradiction(self, run: Run, asked: str, recorded: str) -> InputError:
        events, record = self._group.folder.path / EVENTS, run.folder.path / RECORD
        problem = f"{events}: asks for the run {run.name} {asked}, and {record} has {recorded}"
        return InputError(f"{problem}; restore the files, or give another --name")


STUDY_METRICS = (
    Metric("concord_trials", "Trials of the study by state: running, finished, failed", ("state",)),
    Metric("concord_trials_wanted", "Trials that the study will have"),
    Metric("concord_best_trial", "The criterion's value in the best trial so far", ("metric",)),
)


class GroupProgress(Progress):
    """Counts and shows trials or runs; around the pool's work. Trials have ``parts`` runs; ``after`` runs follow."""

    def __init__(
        self,
        what: str,
        total: int,
        info: Callable[[str], None],
        criterion: Criterion | None = None,
        parts: int = 1,
        after: int = 0,
    ) -> None:
        super().__init__(info, f"starting {what}")
        self._what, self._total, self._parts, self._after = what, total, parts, after
        self._criterion = criterion
        self._running: dict[str, float] = {}  # per cent by name
        self._done = self._ended_here = 0.0
        self._failed = 0
        self._best: list[Trial] = []
        self._reasons: set[str] = set()

    def earlier(self, run: Run) -> None:
        """A run that ended before this process began."""
        self._done += 1 / self._parts
        self._failed += run.failure is not None

    def compared(self, trial: Trial) -> None:
        """A trial is over, and may be the best."""
        if self._criterion is not None:
            self._best = self._criterion.ranked([*self._best, trial])[:1]
            if self._pace.begun:
                self._show()

    def evaluated(self, run: str, percent: float) -> None:
        """The run of this name began or has an evaluation."""
        self._running[run] = percent
        self._count()

    def ended(self, run: Run, label: str) -> None:
        """A run is over."""
        self._running.pop(run.name, None)
        self._ended_here += 1 / self._parts
        self.earlier(run)
        self._count()
        if run.failure is not None and run.failure not in self._reasons:
            self._reasons.add(run.failure)
            self._info(f"{label} failed: {run.failure.splitlines()[0]}")

    def continues(self, run: str, seconds: float) -> None:
        """A run continues from a checkpoint after this time of training, which the estimate of the time left counts."""
        self._count(seconds / max(len(self._running), 1))  # the running ones trained side by side
        self._info(f"{run} continues from its checkpoint, after {duration(seconds)} of training")

    def line(self) -> str:
        """The progress in one line."""
        left = self._left()
        parts = [f"{self._done:.0f}/{self._total} {self._what}", *self._details()]
        parts += [] if left is None else [f"{duration(left)} left"]
        return ", ".join(parts + self._then())

    def _count(self, earlier_seconds: float = 0.0) -> None:
        # Running trials count by their progress, so that bar and estimate do not jump at each end.
        self._pace.at(self._done + sum(self._running.values()) / 100 / self._parts, earlier_seconds)
        self._show()

    def _bar(self) -> tuple[str, float, int, str, float | None, str]:
        count, details = f"{self._done:.0f}/{self._total}", ", ".join(self._details() + self._then())
        return self._what, self._pace.done, self._total, count, self._left(), details

    def _left(self) -> float | None:
        return self._pace.seconds_left(self._total) if self._ended_here else None

    def seconds_of(self, runs: int) -> float | None:
        """The time of this number of further runs at the pace so far; None if none ended here."""
        return self._pace.seconds_left(self._pace.done + runs / self._parts) if self._ended_here else None

    def _then(self) -> list[str]:
        takes = self.seconds_of(self._after)
        about = "" if takes is None else f" of about {duration(takes)}"
        return [f"then {self._after} trainings{about}"] if self._after else []

    def _details(self) -> list[str]:
        parts = [f"{len(self._running)} running"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        if self._best and self._criterion is not None:
            value, trial = self._best[0].metrics[self._criterion.metric], self._best[0].number
            parts.append(f"best {self._criterion.shown} {value:.4f} (trial {trial})")
        return parts

    def samples(self) -> list[Sample]:
        """The progress as gauges, from another thread: sums over the trials, of which there may be thousands."""
        counts = {
            "running": len(self._running),
            # 7 sevenths add up to a little less than 1.
            "finished": int(self._done - self._failed / self._parts + 1e-6),
            "failed": self._failed,
        }
        samples = [Sample("concord_trials", float(count), (state,)) for state, count in counts.items()]
        if (best := self._best) and self._criterion is not None:
            metric = self._criterion.metric
            samples.append(Sample("concord_best_trial", best[0].metrics[metric], (metric,)))
        return [*samples, Sample("concord_trials_wanted", float(self._total))]
