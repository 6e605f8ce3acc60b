"""A comparison: named configurations × seeds, the table they make, and the paper's numbers beside it, as data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from concord.errors import InputError
from concord.training.outcome import Evaluation


@dataclass(frozen=True)
class FinishedRun:
    """A run of a comparison that came to its end.

    Attributes:
        seed: of its training.
        options: all its options, resolved, by name.
        history: every evaluation of it, the last one at its end.
    """

    seed: int
    options: Mapping[str, Any]
    history: Sequence[Evaluation]

    @property
    def metrics(self) -> Mapping[str, float]:
        """Those at its end."""
        return self.history[-1].metrics


Runs = Mapping[str, Sequence[FinishedRun]]
"""The finished runs of each configuration, by its name, in the order of their seeds."""
Column = str | Callable[[FinishedRun], float]
"""A metric at the end of a run, or what else is to be taken of a run."""


@dataclass(frozen=True)
class Comparison:
    """A table, or a figure: what is trained for it, and what it shows.

    Attributes:
        configurations: by the name of the row, the options in which it differs from the job's own.
        seeds: how many of each.
        first_seed: the first of them; the others follow.
        columns: by heading, what is shown of each run.
        paper: by row, what is published, by heading: text such as ``70.4 ± 0.9``, or a number. A row that is no
            configuration stands below them.
        source: what the rows of ``paper`` are called, where the paper prints no such numbers.
        percent: whether values are shown times 100.
        digits: decimal places of what is shown.
        figures: by file name (without ending), what draws a figure of all finished runs.
        detail: beginnings of the metrics of single environments or layers that columns and figures need, such as
            ``accuracy/ood/``; others are not kept.
        title: what it is, in a line.
    """

    configurations: Mapping[str, Mapping[str, Any]]
    seeds: int = 10
    first_seed: int = 0
    columns: Mapping[str, Column] = field(default_factory=dict)
    paper: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    source: str = "paper"
    percent: bool = False
    digits: int = 3
    figures: Mapping[str, Callable[[Runs], Any]] = field(default_factory=dict)
    detail: tuple[str, ...] = ()
    title: str = ""

    def __post_init__(self) -> None:
        if not self.configurations:
            raise InputError("Comparison: it has no configurations")
        if self.seeds < 1:
            raise InputError(f"Comparison: seeds={self.seeds}: must be at least 1")
        unknown = {heading for row in self.paper.values() for heading in row} - set(self.columns)
        if unknown:
            raise InputError(f"Comparison: paper has {sorted(unknown)[0]!r}, which is none of the columns")


def grouped(runs: Runs, *options: str) -> dict[Any, list[FinishedRun]]:
    """All runs by the values of these options, in order; of one option by its value alone."""
    found: dict[Any, list[FinishedRun]] = {}
    for each in runs.values():
        for run in each:
            values = tuple(run.options.get(option) for option in options)
            found.setdefault(values[0] if len(options) == 1 else values, []).append(run)
    return found


def at_end(runs: Sequence[FinishedRun], metric: str) -> list[float]:
    """A metric at the end of each run."""
    return [run.metrics[metric] for run in runs]


def at_best(metric: str, of: str, mode: Literal["max", "min"]) -> Callable[[FinishedRun], float]:
    """A column: a metric at the evaluation where the metric ``of`` is best; where both are the same, its best value."""
    best = max if mode == "max" else min
    return lambda run: best(run.history, key=lambda each: each.metrics[of]).metrics[metric]
