"""The runs of a group: proposals and their ends, as events of the group's record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from concord.record import RunHistory
from concord.space import Point, frozen
from concord.training import Evaluation

Kind = Literal["trial", "left-out", "seed", "run"]


@dataclass(frozen=True)
class RunProposal:
    """A run to train.

    Attributes:
        kind: a trial of a search; its repetition with environments left out or another seed; a run of a table.
        trial: the number, from 0.
        point: the point of the space; for a table's run all options.
        seed: of the training; None takes the study's.
        left_out: training environments to leave out in turn.
        whole: whether to train on all environments as well.
        resolved: the values of options whose defaults follow from others, such as ``auto``.
        name: a name for readers; the key by default.
        origin: machine, commit and version of the data, of a run whose results may be kept.
        options: the differences to the base configuration; not recorded.
        parameters, tags: of its MLflow run; recorded for the mirror.
    """

    kind: Kind
    trial: int
    point: Point
    seed: int | None = None
    left_out: tuple[str, ...] = ()
    whole: bool = True
    resolved: Point = field(default_factory=dict)
    name: str | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    parameters: Mapping[str, Any] = field(default_factory=dict, compare=False)
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> str:
        """Unique in the group."""
        return f"{self.kind} {self.trial}" + ("" if self.seed is None else f" seed {self.seed}")

    def as_event(self) -> dict[str, Any]:
        """The fields of its begin event, without defaults."""
        fields = {name: value for name, value in vars(self).items() if name != "options"}
        return {name: value for name, value in fields.items() if value != _DEFAULTS.get(name, ())}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> "RunProposal":
        """The proposal that began with these fields."""
        known = {name: value for name, value in fields.items() if name in RunProposal.__dataclass_fields__}
        points = {
            part: {name: frozen(value) for name, value in known.get(part, {}).items()} for part in ("point", "resolved")
        }
        return RunProposal(**{**known, **points, "left_out": tuple(known.get("left_out", ()))})


_DEFAULTS: Mapping[str, Any] = {"seed": None, "name": None, "whole": True, "resolved": {}, "origin": {}}


@dataclass(frozen=True)
class EndedRun:
    """An ended run of a group.

    Attributes:
        seconds: from its start to its end.
        ended: the time, in seconds since 1970.
        stopped: the reason for an early end, None if there was none.
        failure: the reason, None if it did not fail.
    """

    run: RunProposal
    history: Sequence[Evaluation]
    seconds: float
    ended: float
    stopped: str | None = None
    failure: str | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics at the end; empty if it failed."""
        return self.history[-1].metrics if self.history and self.failure is None else {}

    @staticmethod
    def read(history: RunHistory) -> "EndedRun | None":
        """The ended run of this history; None if it has not begun or ended, or was given up."""
        began, ended = history.began, history.ended
        if began is None or ended is None or ended["status"] == "KILLED":
            return None
        return EndedRun(
            RunProposal.read(began),
            [Evaluation(*moment, metrics) for moment, metrics in history.evaluations.items()],
            ended["seconds"],
            ended["at"] / 1000,
            ended.get("stopped"),
            ended.get("failure"),
        )


class Proposer(Protocol):
    """Decides the runs of a pool, and is told how they ended. Called from one thread."""

    def next(self) -> RunProposal | None:
        """The next run; None when there are no more."""

    def ended(self, run: EndedRun) -> None:
        """A run is over."""


class ProposalList:
    """Proposes these runs in turn, and reports each end to a function."""

    def __init__(self, runs: Sequence[RunProposal], tell: Callable[[EndedRun], None] = lambda _: None) -> None:
        self._left, self.ended = list(runs), tell

    def next(self) -> RunProposal | None:
        """The next run."""
        return self._left.pop(0) if self._left else None


class GroupRuns:
    """The runs of a group, from the history of its events."""

    def __init__(self, history: Mapping[str, RunHistory]) -> None:
        self._history = history

    def begun(self, kind: Kind) -> list[RunProposal]:
        """The runs of this kind, in the order of their first beginnings."""
        began = [each.began for key, each in self._history.items() if key and each.began is not None]
        return [RunProposal.read(fields) for fields in began if fields["kind"] == kind]

    def ended(self, kind: Kind) -> list[EndedRun]:
        """The ended runs, in the order of their ends."""
        found = [EndedRun.read(each) for key, each in self._history.items() if key]
        return sorted((each for each in found if each and each.run.kind == kind), key=lambda each: each.ended)

    def finished(self, kind: Kind) -> list[EndedRun]:
        """The ended runs that did not fail."""
        return [each for each in self.ended(kind) if each.failure is None]

    def unfinished(self, kind: Kind) -> list[RunProposal]:
        """The runs that began and have not ended, or were given up."""
        return [each for each in self.begun(kind) if self.find(each.key) is None]

    def find(self, key: str) -> EndedRun | None:
        """The ended run of this key, if it ended."""
        return EndedRun.read(self._history[key]) if key in self._history else None
