"""A comparison: named configurations × seeds, the table they make, and the paper's numbers beside it, as data."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from concord.errors import InputError
from concord.options import shortened
from concord.record import Evaluation, Run
from concord.training.declared_measures import Mode
from concord.training.options import LeftOut


@dataclass(frozen=True)
class Folds:
    """Training environments that a comparison leaves out in turn, each once: one a run, or folds of several.

    Attributes:
        measure: the measure that chooses, on the others' held-out examples, and that is shown of those left out.
        folds: the environments that are left out together; none for each alone.
    """

    environments: tuple[str, ...]
    measure: str
    mode: Mode
    folds: tuple[tuple[str, ...], ...] = ()

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What each run leaves out."""
        return self.folds or self.environments


Runs = Mapping[str, Sequence[Run]]
"""The finished runs of each configuration, by its name, in the order of their seeds."""
Column = str | Callable[[Run], float]
"""A metric at the end of a run, or a function of the run."""


@dataclass(frozen=True)
class Comparison:
    """A table or a figure: the runs it needs and the numbers it shows.

    Attributes:
        configurations: for each row, the options that differ from the job's.
        seeds: the number of seeds of each configuration.
        first_seed: the first seed; the others follow it.
        columns: for each heading, the value shown of a run.
        paper: for each row, the published values by heading: text such as ``70.4 ± 0.9``, or a number. A row without a
            configuration stands at the bottom.
        source: the label of the ``paper`` rows, if the numbers are not the paper's.
        percent: show values times 100.
        digits: decimal places.
        figures: functions that draw a figure of all finished runs, by file name (without ending).
        title: a line above the table.
        folds: environments that each configuration and seed leaves out in turn.
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
    title: str = ""
    folds: Folds | None = None

    def __post_init__(self) -> None:
        right = "give the options of each row by its name, such as {'average': {'aggregator': 'mean'}}"
        if not self.configurations:
            raise InputError(f"configurations {{}}: has no row to compare; {right}")
        for row, options in self.configurations.items():
            if not isinstance(options, Mapping):
                raise InputError(f"configurations {row}={shortened(repr(options))}: must be a dictionary; {right}")
        if self.seeds < 1:
            raise InputError(f"Comparison: seeds={self.seeds}: must be at least 1")
        unknown = {heading for row in self.paper.values() for heading in row} - set(self.columns)
        if unknown:
            raise InputError(f"Comparison: paper has {sorted(unknown)[0]!r}, which is not a column")


def grouped(runs: Runs, *options: str) -> dict[Any, list[Run]]:
    """All runs, grouped by the values of these options; the key is the value itself for a single option."""
    found: dict[Any, list[Run]] = {}
    for each in runs.values():
        for run in each:
            values = tuple(run.options.get(option) for option in options)
            found.setdefault(values[0] if len(options) == 1 else values, []).append(run)
    return found


def at_end(runs: Sequence[Run], metric: str) -> list[float]:
    """A metric at the end of each run."""
    return [run.metrics[metric] for run in runs]


def curve(history: Sequence[Evaluation], metric: str) -> list[tuple[float, float]]:
    """A metric at each evaluation of a run: ``(fraction of the run, value)``."""
    return [(each.epoch / history[-1].epoch, each.metrics[metric]) for each in history]


def at_best(metric: str, of: str, mode: Literal["max", "min"]) -> Callable[[Run], float]:
    """A column: a metric at the evaluation where the metric ``of`` is best; where both are the same, its best value.

    A NaN is the worst value.
    """
    sign = 1 if mode == "max" else -1

    def rank(evaluation: Evaluation) -> float:
        value = evaluation.metrics[of]
        return -math.inf if math.isnan(value) else sign * value

    return lambda run: max(run.history, key=rank).metrics[metric]
