"""A study on disk: what it is (``study.json``), and a line for every trial that began or ended (``trials.jsonl``).

A comparison is kept in the same form. The journal is the truth of either. Ray Tune's own state, the searcher's and
MLflow's follow from it, so a process killed at any moment loses nothing that was finished, and nothing counts twice.
Lines are synced to the disk.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from concord.errors import InputError, RunFailedError
from concord.space import Point, frozen
from concord.storage import Folder, JsonLines, Lines

STUDY, TRIALS = "study.json", "trials.jsonl"
Kind = Literal["trial", "left-out", "seed", "run"]


@dataclass(frozen=True)
class TrialSpec:
    """One thing to be trained and judged.

    Attributes:
        kind: a trial of the search; a trial trained again with environments left out, or with another seed; a run of a
            comparison.
        trial: its number, from 0.
        point: of the space; of a run all its options.
        seed: of the training; None takes the study's.
        left_out: training environments to leave out in turn.
        whole: whether to train on all environments (too).
        resolved: what options that leave it to others, such as ``auto``, stand for.
        name: what a reader calls it; None where that is its key.
        origin: of a run: the command, the commit and the machine that it came from.
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

    @property
    def key(self) -> str:
        """Unique in the study."""
        return f"{self.kind} {self.trial}" + ("" if self.seed is None else f" seed {self.seed}")


@dataclass(frozen=True)
class TrialResult:
    """What became of a task.

    Attributes:
        metrics: the last ones; empty if it failed.
        history: the metrics at every evaluation: (epoch, step, metrics).
        seconds: from its start to its end.
        ended: when, in seconds since 1970.
        stopped: what ended it early, None if it came to its end.
        failure: why it failed, None if it did not.
    """

    metrics: dict[str, float]
    history: list[tuple[int, int, dict[str, float]]]
    seconds: float
    ended: float
    stopped: str | None = None
    failure: str | None = None


@dataclass
class Journal:
    """What is known of a study; made by :func:`opened`.

    Attributes:
        folder: of the study.
        tasks: every task that began, by key, in the order in which they did.
        ended: those that ended, in the order in which they did.
        kept: where it is kept, if it is open.
    """

    folder: Path
    tasks: dict[str, TrialSpec] = field(default_factory=dict)
    ended: dict[str, TrialResult] = field(default_factory=dict)
    kept: Folder = field(init=False, repr=False, compare=False)
    _lines: JsonLines | None = None
    _sent: Lines | None = None

    def begin(self, task: TrialSpec) -> None:
        """Keep that a task began; again is no news, but where it comes from another command or commit."""
        before = self.tasks.get(task.key)
        if before is not None and before.origin == task.origin:
            return
        self._write({"event": "began", "key": task.key, **vars(task)})
        self.tasks[task.key] = task

    def end(self, task: TrialSpec, ended: TrialResult) -> None:
        """Keep how a task ended; the first end counts, unless it was a failure."""
        if task.key in self.ended and self.ended[task.key].failure is None:
            return
        self._write({"event": "ended", "key": task.key, **vars(ended)})
        self._replace(task.key, ended)

    def results(self, kind: Kind) -> list[tuple[TrialSpec, TrialResult]]:
        """The ended tasks of this kind, in the order of their ends."""
        return [(self.tasks[key], ended) for key, ended in self.ended.items() if self.tasks[key].kind == kind]

    def finished(self, kind: Kind) -> list[tuple[TrialSpec, TrialResult]]:
        """Those that did not fail."""
        return [(task, ended) for task, ended in self.results(kind) if ended.failure is None]

    def unfinished(self, kind: Kind) -> list[TrialSpec]:
        """The tasks of this kind that began and did not end."""
        return [task for key, task in self.tasks.items() if task.kind == kind and key not in self.ended]

    def _replace(self, key: str, ended: TrialResult) -> None:
        self.ended.pop(key, None)  # its place is that of its last end
        self.ended[key] = ended

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._lines is None:
            raise ValueError("this journal was opened to be read only")
        try:
            self._lines.append(line)
            self._lines.sync()
        except OSError as error:
            raise RunFailedError(f"{self.folder / TRIALS} cannot be written ({error.strerror})") from error
        if self._sent is not None:
            self._sent.keep()


def read(folder: Path) -> Journal:
    """The journal of a study as it is now, for reports."""
    journal = Journal(folder)
    path = folder / TRIALS
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            _take(journal, json.loads(line))
    return journal


@contextlib.contextmanager
def opened(folder: Path | Folder, what: str = "study") -> Iterator[Journal]:
    """The journal of a study, to go on with it.

    Args:
        folder: of the study; where it is kept elsewhere, what is kept there is what counts.
        what: a study or a comparison, for the refusal.

    Raises:
        InputError: another process has it open.
    """
    kept = folder if isinstance(folder, Folder) else Folder(folder)
    folder = kept.path
    with kept.locked(what):
        path = folder / TRIALS
        sent = kept.lines(TRIALS)
        sent.fetch()
        with JsonLines(path) as lines:  # which cuts off what a kill left of a line
            journal = read(folder)
            journal.kept, journal._sent, journal._lines = kept, sent, lines
            try:
                yield journal
            finally:
                journal._lines = None


def read_study(folder: Path) -> dict[str, Any]:
    """What a study is.

    Raises:
        InputError: there is no study in this folder.
    """
    try:
        study: dict[str, Any] = json.loads((folder / STUDY).read_text())
    except FileNotFoundError as error:
        raise InputError(f"--name {folder.name}: there is no such study in {folder.parent.parent}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"--name {folder.name}: {folder / STUDY} cannot be read ({error})") from error
    return study


def write_study(folder: Path, study: Mapping[str, Any]) -> None:
    """Replace what is said of a study, at once and as a whole."""
    new = folder / f"{STUDY}.new"
    with new.open("w") as file:
        json.dump(study, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / STUDY)


def _take(journal: Journal, line: dict[str, Any]) -> None:
    event, key = line.pop("event"), line.pop("key")
    if event == "began":
        points = {
            part: {name: frozen(value) for name, value in line.pop(part, {}).items()} for part in ("point", "resolved")
        }
        journal.tasks[key] = TrialSpec(**{**line, **points, "left_out": tuple(line["left_out"])})
    else:
        history = [(epoch, step, metrics) for epoch, step, metrics in line.pop("history")]
        journal._replace(key, TrialResult(**line, history=history))
