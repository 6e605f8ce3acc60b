"""Tables of runs, for readers and as JSON, and the lines of results behind a document's table."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from concord.analysis.consistency.measurement import as_cells, read_measurements
from concord.analysis.figures import method_name
from concord.analysis.spread import finite, mean_and_std, with_spread
from concord.storage import Folder, json_line
from concord.training import Comparison

ANALYZED = "analyzed"  # instead of a table's name: the results of ``concord analyze``
Cells = tuple[list[str], list[list[str]]]
"""Header and rows of a table, as text."""
Shown = str | Cells | Mapping[str, Any]
"""Output of a command: a line, a table, or mappings by title."""
Column = str | Callable[[Any], Any]
"""A metric of a row, or a function of it: text, a number, or the numbers of several runs."""


class NamedMetrics(NamedTuple):
    """A row with a name and numbers."""

    name: str
    metrics: Mapping[str, Any]


def table(columns: Mapping[str, Column], rows: Iterable[Any], digits: int = 3) -> Cells:
    """A table of these rows, with columns by heading; ``digits`` are the decimal places of means over runs."""
    return list(columns), [[_shown(cell(column, row), digits) for column in columns.values()] for row in rows]


def cell(column: Column, row: Any) -> Any:
    """The value of a row in a column; None for a missing metric."""
    return row.metrics.get(column) if isinstance(column, str) else column(row)


def _shown(value: Any, digits: int) -> str:
    if value is None or value == []:
        return "–"
    if isinstance(value, list):
        return with_spread(value, digits)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(cells: Cells) -> str:
    """A table in Markdown."""
    header, rows = cells
    lines = [["", *header[1:]], ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |")


@dataclass(frozen=True)
class KeptLine:
    """A run as kept for a document.

    Attributes:
        configuration: the name of the row.
        values: by heading; a line of results has the finite ones, since JSON lacks the others.
        origin: command, commit and machine, and the version of the data if known.
    """

    configuration: str
    seed: int
    values: Mapping[str, float]
    seconds: float
    origin: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """The line in a file of results."""
        values = {heading: value for heading, value in self.values.items() if math.isfinite(value)}
        line = {"configuration": self.configuration, "seed": self.seed, "values": values}
        return {**line, "seconds": round(self.seconds, 1), **self.origin}


@dataclass(frozen=True)
class ResultsTable:
    """A table and its runs."""

    name: str
    comparison: Comparison
    lines: Sequence[KeptLine]

    def rows(self) -> list[dict[str, Any]]:
        """The contract of ``concord compare --json``: mean, standard deviation and the number of finite values behind
        them, and the paper's mean, by metric.
        """
        columns = self.comparison.columns
        return [
            {
                "table": self.name,
                "name": name,
                "seeds": self._seeds(name),
                "metrics": {
                    column if isinstance(column, str) else heading: mean_and_std(values)
                    | {"values": len(values)}
                    | dict(zip(("paper", "paper_std"), self._paper(name, heading), strict=True))
                    for heading, column in columns.items()
                    for values in [self._values(name, heading)]
                },
            }
            for name in self.comparison.configurations
        ]

    def numbers(self, configuration: str, heading: str) -> list[float]:
        """The finite values of a row in a column over its runs, in the unit that the table shows."""
        return [self._scale * value for value in self._values(configuration, heading)]

    def cells(self) -> Cells:
        """The table as text, with the paper's rows below ours."""
        ours, paper, columns = self.comparison.configurations, self.comparison.paper, self.comparison.columns
        rows: list[NamedMetrics] = []
        for name in ours:
            values = {each: self._cell(name, each) for each in columns}
            rows.append(NamedMetrics(method_name(name), {"seeds": self._seeds(name), **values}))
            if name in paper:
                rows.append(NamedMetrics(f"{method_name(name)}, {self.comparison.source}", self._published(name)))
        rows += [NamedMetrics(name, self._published(name)) for name in paper if name not in ours]
        shown: dict[str, Column] = {self.name: operator.attrgetter("name"), "seeds": "seeds"}
        return table(shown | {heading: heading for heading in columns}, rows, self.comparison.digits)

    def shown(self) -> list[Shown]:
        """The table under its title."""
        title = self.comparison.title
        return [*([f"{self.name}: {title}"] if title else []), self.cells()]

    def markdown(self) -> str:
        """The table under its title, in Markdown."""
        title = self.comparison.title
        return (f"{title}\n\n" if title else "") + markdown(self.cells())

    def _seeds(self, configuration: str) -> int:
        return sum(line.configuration == configuration for line in self.lines)

    def _cell(self, configuration: str, heading: str) -> list[float] | str:
        """The values of a row in a column; with fewer than its seeds, their mean and how many they are."""
        values, seeds = self.numbers(configuration, heading), self._seeds(configuration)
        if 0 < len(values) < seeds:
            return f"{with_spread(values, self.comparison.digits)} ({len(values)} of {seeds})"
        return values

    def _values(self, configuration: str, heading: str) -> list[float]:
        lines = [line for line in self.lines if line.configuration == configuration]
        return finite(line.values.get(heading, math.nan) for line in lines)

    def _published(self, name: str) -> dict[str, str]:
        found = {heading: self.comparison.paper[name].get(heading, "") for heading in self.comparison.columns}
        shown = {
            key: each if isinstance(each, str) else f"{each:.{self.comparison.digits}f}" for key, each in found.items()
        }
        return {"seeds": "", **shown}

    def _paper(self, name: str, heading: str) -> tuple[float | None, float | None]:
        """The paper's mean and spread in the unit of the metric."""
        parts = str(self.comparison.paper.get(name, {}).get(heading, "")).split("±")
        try:
            numbers = [float(part) / self._scale for part in parts]
        except ValueError:
            return None, None
        return numbers[0], numbers[1] if len(numbers) > 1 else None

    @property
    def _scale(self) -> float:
        return 100.0 if self.comparison.percent else 1.0


def results_file(job: str, table: str) -> str:
    """The name of the file of a table's lines."""
    return f"{job}-{table}.jsonl"


def as_lines(lines: Iterable[KeptLine]) -> bytes:
    """The lines of a table, as JSON."""
    return b"".join(json_line(line.as_json()) for line in lines)


def write_lines(lines: Iterable[KeptLine], results: Path, job: str, table: str) -> Path:
    """Write the lines of a table into this folder; return the file."""
    file = results_file(job, table)
    Folder(results).write(file, as_lines(lines))
    return results / file


def write_analyses(analyses: Sequence[Mapping[str, Any]], command: str, results: Path) -> Path:
    """Write the results of ``concord analyze`` for runs of one job; return the file."""
    lines = [
        KeptLine(
            each["method"],
            each["seed"],
            as_cells(read_measurements(each)),
            each["seconds"],
            {"command": command, **each["origin"]},
        )
        for each in analyses
    ]
    return write_lines(lines, results, analyses[0]["job"], ANALYZED)
