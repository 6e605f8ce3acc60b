"""Lines of results: the runs of a table as a document keeps them, one JSON line a run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from concord.analysis.consistency.measurement import as_cells, read_measurements
from concord.analysis.figures import method_name
from concord.storage import Folder, json_line
from concord.table import Column, Table
from concord.training import Comparison

ANALYZED = "analyzed"  # instead of a table's name: the results of ``concord analyze``


@dataclass(frozen=True)
class ResultLine:
    """A finished run in a file of results.

    Attributes:
        configuration: the name of the row.
        values: by heading; the file has the finite ones, since JSON lacks the others.
        origin: command, commit and machine, and the version of the data if known.
    """

    configuration: str
    seed: int
    values: Mapping[str, float]
    seconds: float
    origin: Mapping[str, str]
    failure: ClassVar[None] = None

    def as_json(self) -> dict[str, Any]:
        """The line in a file of results."""
        values = {heading: value for heading, value in self.values.items() if math.isfinite(value)}
        line = {"configuration": self.configuration, "seed": self.seed, "values": values}
        return {**line, "seconds": round(self.seconds, 1), **self.origin}

    @staticmethod
    def read(line: Mapping[str, Any]) -> "ResultLine":
        """The line of this JSON."""
        own = ("configuration", "seed", "values", "seconds")
        origin = {name: value for name, value in line.items() if name not in own}
        return ResultLine(**{name: line[name] for name in own}, origin=origin)


def columns_of(comparison: Comparison) -> list[Column]:
    """The columns of a comparison, of its runs."""
    digits, percent = comparison.digits, comparison.percent
    return [Column(heading, value, digits, percent) for heading, value in comparison.columns.items()]


def table_of_lines(
    name: str,
    lines: Sequence[ResultLine],
    columns: Sequence[Column] | None = None,
    rows: Iterable[str] | None = None,
    failed: Mapping[str, Sequence[Any]] | None = None,
    **parts: Any,
) -> Table:
    """A table over these lines, by default with their rows and columns; ``failed`` has the failed runs of rows."""
    if columns is None:
        columns = [Column(heading) for heading in dict.fromkeys(each for line in lines for each in line.values)]
    runs: dict[str, list[Any]] = {row: [] for row in rows or [line.configuration for line in lines]}
    for line in lines:
        runs[line.configuration].append(line)
    every = {row: [*of_row, *(failed or {}).get(row, ())] for row, of_row in runs.items()}
    return Table.over(name, columns, every, label=method_name, value=_value, **parts)


def comparison_table(name: str, comparison: Comparison, lines: Sequence[ResultLine], **parts: Any) -> Table:
    """The table of a comparison over these lines."""
    parts |= {"title": comparison.title, "published": comparison.paper, "source": comparison.source}
    return table_of_lines(name, lines, columns_of(comparison), comparison.configurations, **parts)


def _value(column: Column, line: ResultLine) -> float | None:
    return line.values.get(column.title)


def results_file(job: str, table: str) -> str:
    """The name of the file of a table's lines."""
    return f"{job}-{table}.jsonl"


def as_lines(lines: Iterable[ResultLine]) -> bytes:
    """The lines of a table, as JSON."""
    return b"".join(json_line(line.as_json()) for line in lines)


def write_lines(lines: Iterable[ResultLine], results: Path, job: str, table: str) -> Path:
    """Write the lines of a table into this folder; return the file."""
    file = results_file(job, table)
    Folder(results).write(file, as_lines(lines))
    return results / file


def write_analyses(analyses: Sequence[Mapping[str, Any]], command: str, results: Path) -> Path:
    """Write the results of ``concord analyze`` for runs of one job; return the file."""
    lines = [
        ResultLine(
            each["method"],
            each["seed"],
            as_cells(read_measurements(each)),
            each["seconds"],
            {"command": command, **each["origin"]},
        )
        for each in analyses
    ]
    return write_lines(lines, results, analyses[0]["job"], ANALYZED)
