"""The runs of a group: what is proposed, and how it ended, as the events of the group's record have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from concord.record import RunHistory
from concord.space import Point, frozen
from concord.training import Evaluation

Kind = Literal["trial", "left-out", "seed", "run"]


@dataclass(frozen=True)
class RunProposal:
    """A run that is to be trained and judged.

    Attributes:
        kind: a trial of a search; a trial trained again with environments left out, or with another seed; a run of a
            table.
        trial: its number, from 0.
        point: of the space; of a table's run all its options.
        seed: of the training; None takes the study's.
        left_out: training environments to leave out in turn.
        whole: whether to train on all environments as well.
        resolved: what options that leave it to others, such as ``auto``, stand for.
        name: what a reader calls it; the key if not given.
        origin: of a table's run: the command, the commit and the machine that it came from.
        options: in what its configuration differs from the one that all runs start from; not recorded.
        parameters, tags: of its MLflow run; the record has them for the mirror.
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
        """The fields of its beginning, without those at their defaults."""
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
    """A run of a group that came to an end.

    Attributes:
        run: what was proposed.
        history: every evaluation.
        seconds: from its start to its end.
        ended: when, in seconds since 1970.
        stopped: what ended it early, None if it came to its own end.
        failure: why it failed, None if it did not.
    """

    run: RunProposal
    history: Sequence[Evaluation]
    seconds: float
    ended: float
    stopped: str | None = None
    failure: str | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The last ones; none if it failed."""
        return self.history[-1].metrics if self.history and self.failure is None else {}

    @staticmethod
    def read(history: RunHistory) -> "EndedRun | None":
        """The run of this history; None if it did not begin, or has not ended, or was given up."""
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
    """Decides what a pool runs, and hears how it ended. Called from one thread."""

    def next(self) -> RunProposal | None:
        """The next run; None when there are no more."""

    def ended(self, run: EndedRun) -> None:
        """A run is over."""


class Listed:
    """Proposes these runs in turn."""

    def __init__(self, runs: Sequence[RunProposal]) -> None:
        self._left = list(runs)

    def next(self) -> RunProposal | None:
        """The next of them."""
        return self._left.pop(0) if self._left else None

    def ended(self, run: EndedRun) -> None:
        """Nothing follows from it."""


class GroupRuns:
    """The runs of a group, as its events have them now.

    Args:
        history: of :class:`~concord.record.Events`, or as :func:`~concord.record.read_history` gives it.
    """

    def __init__(self, history: Mapping[str, RunHistory]) -> None:
        self._history = history

    def begun(self, kind: Kind) -> list[RunProposal]:
        """The runs of this kind, in the order in which they began first."""
        began = [each.began for key, each in self._history.items() if key and each.began is not None]
        return [RunProposal.read(fields) for fields in began if fields["kind"] == kind]

    def ended(self, kind: Kind) -> list[EndedRun]:
        """Those that ended, in the order of their ends."""
        found = [EndedRun.read(each) for key, each in self._history.items() if key]
        return sorted((each for each in found if each and each.run.kind == kind), key=lambda each: each.ended)

    def finished(self, kind: Kind) -> list[EndedRun]:
        """Those that did not fail."""
        return [each for each in self.ended(kind) if each.failure is None]

    def unfinished(self, kind: Kind) -> list[RunProposal]:
        """Those that began and did not end, or were given up."""
        return [each for each in self.begun(kind) if self.find(each.key) is None]

    def find(self, key: str) -> EndedRun | None:
        """The run of this key with how it ended, if it did."""
        return EndedRun.read(self._history[key]) if key in self._history else None
