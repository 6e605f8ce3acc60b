"""Finished runs of a comparison, as figures take them: by the row they are of, or by what their options say."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from concord.analysis.training_curves import Evaluated


class ComparedRun(Protocol):
    """A finished run."""

    @property
    def options(self) -> Mapping[str, Any]:
        """All that decided over it, resolved, by name."""

    @property
    def history(self) -> Sequence[Evaluated]:
        """Every evaluation of it."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Those at its end."""


ComparedRuns = Mapping[str, Sequence[ComparedRun]]
"""The runs of each row of a table."""


def grouped(runs: ComparedRuns, *options: str) -> dict[Any, list[ComparedRun]]:
    """All runs by the values of these options, in order; of one option by its value alone."""
    found: dict[Any, list[ComparedRun]] = {}
    for each in runs.values():
        for run in each:
            values = tuple(run.options.get(option) for option in options)
            found.setdefault(values[0] if len(options) == 1 else values, []).append(run)
    return found


def at_end(runs: Sequence[ComparedRun], metric: str) -> list[float]:
    """A metric at the end of each run."""
    return [run.metrics[metric] for run in runs]
