"""The runs of a group: who proposes them, and what became of them, from the runs' own records."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from concord.record import Evaluation, Run, folder_of, read_run
from concord.runs.key import Key
from concord.runs.spec import RunSpec
from concord.space import Point, frozen
from concord.studies.criterion import TrialEvaluator, left_out_metrics

Kind = Literal["trial", "left-out", "seed", "cell"]
"""A trial of a search; the best trials with environments left out, or with another seed; a cell of a table."""


@dataclass(frozen=True)
class Trial:
    """A trial, or a repetition of one: a run on all environments, runs with one left out each, or both.

    Attributes:
        number: from 0.
        point: of the space.
        resolved: the values of options whose defaults follow from others, such as ``auto``.
        run: on all environments; None if only folds were asked for.
        folds: by the environment that is left out.
    """

    kind: Kind
    number: int
    point: Point
    seed: int | None
    resolved: Point
    run: Run | None
    folds: Mapping[str, Run]
    evaluator: TrialEvaluator = field(repr=False)

    @property
    def runs(self) -> list[Run]:
        """All its runs."""
        return [*([] if self.run is None else [self.run]), *self.folds.values()]

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
        return found | (left_out_metrics([each.metrics for each in self.folds.values()], self.evaluator.modes))

    @property
    def history(self) -> list[Evaluation]:
        """The evaluations on all environments; of folds alone, their end."""
        if self.run is None:
            return [each.history[-1]._replace(metrics=self.metrics) for each in [*self.folds.values()][-1:]]
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

    def places(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The names and the places of all runs that were asked for, in this order."""
        yield from ((place["run"], place) for place in self._group.asked)

    def begun(self, kind: Kind) -> list[Trial]:
        """The trials of this kind, in the order in which they were asked for."""
        parts: dict[tuple[int, int | None], dict[str | None, tuple[str, Mapping[str, Any]]]] = {}
        for name, place in self.places():
            if place["kind"] == kind:
                parts.setdefault((place["trial"], place.get("seed")), {})[place.get("left_out")] = name, place
        found = []
        for (number, seed), named in parts.items():
            _, first = next(iter(named.values()))
            point, resolved = (
                {name: frozen(value) for name, value in first.get(part, {}).items()} for part in ("point", "resolved")
            )
            runs = {left_out: self.run(name) for left_out, (name, _) in named.items()}
            whole = runs.pop(None, None)
            folds = {str(left_out): run for left_out, run in runs.items()}
            found.append(Trial(kind, number, point, seed, resolved, whole, folds, self._evaluator))
        return found

    def ended(self, kind: Kind) -> list[Trial]:
        """The trials that are over, in the order of their ends."""
        return sorted((each for each in self.begun(kind) if each.complete), key=lambda each: each.ended)

    def finished(self, kind: Kind) -> list[Trial]:
        """The ended trials that did not fail."""
        return [each for each in self.ended(kind) if each.failure is None]

    def by_key(self, key: Key) -> Run | None:
        """The latest run with this key; with only the part without data, if the key does not say which."""
        name = self._names.get(key.value)
        return None if name is None else self.run(name)

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """The name of the latest run by its key, and by the part of the key without data."""
        found: dict[str, str] = {}
        for name, place in self.places():
            found |= {place["key"]: name, place["key"].partition("-")[0]: name}
        return found
