"""The table of all results: rows × columns over runs, as text, Markdown, CSV, HTML, JSON and a pandas frame.

A cell is text, a number, or the numbers of several runs, from which every form takes mean, spread and count. Of a run
only its metrics and its failure are read, by its columns or functions of it.
"""

import csv
import dataclasses
import html
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from concord.analysis.spread import finite, mean_and_std, with_spread
from concord.errors import printable

Cell = Any
"""Text, a number, or a list of the numbers of several runs; None without a value."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        value: a metric of a run, or a function of the run; by default the metric of this heading.
        digits: decimal places of means over runs.
        percent: show numbers over runs times 100; JSON and frames keep the metric's unit.
        oracle: mark the heading, since the test has chosen these values.
        about: numbers beside the heading of a transposed table, by name.
        aside: leave it out of text, Markdown and HTML; CSV, JSON and frames have it.
    """

    heading: str
    value: str | Callable[[Any], Cell] = ""
    digits: int = 3
    percent: bool = False
    oracle: bool = False
    about: Mapping[str, float] = field(default_factory=dict)
    aside: bool = False

    @property
    def title(self) -> str:
        """The heading with its mark."""
        return printable(self.heading) + " (oracle)" * self.oracle

    @property
    def key(self) -> str:
        """The name in JSON: the metric, or the heading of a function."""
        return self.value if isinstance(self.value, str) and self.value else self.heading

    @property
    def scale(self) -> float:
        """The factor of shown numbers over runs."""
        return 100.0 if self.percent else 1.0

    def of(self, run: Any) -> Cell:
        """The value of a run; None for a missing metric."""
        return self.value(run) if callable(self.value) else run.metrics.get(self.value or self.heading)

    def text(self, cell: Cell, runs: int = 0) -> str:
        """The cell as text; of fewer numbers than ``runs`` also how many they are."""
        if cell is None or cell == []:
            return "–"
        if isinstance(cell, list):
            part = f" ({len(cell)} of {runs})" if len(cell) < runs else ""
            return with_spread([self.scale * number for number in cell], self.digits) + part
        return f"{cell:.4g}" if isinstance(cell, float) else printable(str(cell))

    def published(self, cell: str | float) -> tuple[float | None, float | None]:
        """Mean and spread of a published value, such as ``70.4 ± 0.9``, in the unit of the metric."""
        try:
            mean, *spread = [float(part) / self.scale for part in str(cell).split("±")]
        except ValueError:
            return None, None
        return mean, next(iter(spread), None)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        cells: one for each column.
        name: in JSON, frames and files.
        label: in text.
        runs: the finished runs behind the numbers.
        missing, failed: the numbers of other runs.
    """

    cells: Sequence[Cell]
    name: str = ""
    label: str = ""
    runs: Sequence[Any] = ()
    missing: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Table:
    """Rows × columns.

    Attributes:
        name: the heading of the rows' labels; without one the rows have neither labels nor numbers of seeds.
        title: a line above the table.
        published: published values by row and heading: text or a number, in the unit that the table shows. They stand
            below their row, or at the bottom without one.
        source: the label of published values.
        transposed: show rows as columns in text.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    name: str = ""
    title: str = ""
    published: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    source: str = "paper"
    transposed: bool = False

    @staticmethod
    def plain(header: Iterable[str], rows: Iterable[Sequence[Cell]]) -> "Table":
        """A table of these cells."""
        return Table([Column(heading) for heading in header], [Row(cells) for cells in rows])

    @staticmethod
    def of(columns: Sequence[Column], items: Iterable[Any]) -> "Table":
        """A table with a row for each item."""
        return Table(columns, [Row([column.of(item) for column in columns]) for item in items])

    @staticmethod
    def over(
        name: str,
        columns: Sequence[Column],
        runs: Mapping[str, Iterable[Any]],
        *,
        missing: Mapping[str, int] | None = None,
        label: Callable[[str], str] = str,
        value: Callable[[Column, Any], Cell] = Column.of,
        **parts: Any,
    ) -> "Table":
        """A table of the finite numbers of the runs of each row, of which some may have failed; ``value`` reads one."""
        rows = []
        for row, of_row in runs.items():
            every = list(of_row)
            finished = [run for run in every if run.failure is None]
            values = ([value(column, run) for run in finished] for column in columns)
            cells = [finite(float(number) for number in found if number is not None) for found in values]
            counts = (missing or {}).get(row, 0), len(every) - len(finished)
            rows.append(Row(cells, row, label(row), finished, *counts))
        return Table(columns, rows, name, **parts)

    @staticmethod
    def nested(title: str, value: Mapping[Any, Any]) -> "Table":
        """A table of a mapping, perhaps of mappings.

        The keys of the innermost mappings become columns, and the outer keys begin the rows, one column a level. If
        depths differ, each value has a row of its own.
        """
        outer: _Entries = [((), value)]
        inner = _within(outer)
        while inner and all(isinstance(each, Mapping) and each for _, each in inner):
            outer, inner = inner, _within(inner)
        levels = len(outer[0][0])
        if levels == 0:
            while any(isinstance(each, Mapping) and each for _, each in inner):
                inner = _within(inner)
            return Table.plain([title, ""], [[", ".join(names), format_value(each)] for names, each in inner])
        columns = list(dict.fromkeys(names[-1] for names, _ in inner))
        rows = []
        for names, each in outer:
            cells = {str(key): format_value(cell) for key, cell in each.items()}
            rows.append([*names, *(cells.get(column, "") for column in columns)])
        return Table.plain([title, *[""] * (levels - 1), *columns], rows)

    @property
    def runs(self) -> list[Any]:
        """The finished runs behind all rows."""
        return [run for row in self.rows for run in row.runs]

    def numbers(self, row: str, heading: str) -> list[float]:
        """The numbers of a row in a column, in the unit that the table shows."""
        place, column = next((at, each) for at, each in enumerate(self.columns) if each.title == heading)
        return [column.scale * number for each in self.rows if each.name == row for number in each.cells[place]]

    def cells(self, aside: bool = False) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, also of columns that stand aside."""
        if not aside and any(column.aside for column in self.columns):
            shown = [place for place, column in enumerate(self.columns) if not column.aside]
            rows_shown = [dataclasses.replace(row, cells=[row.cells[place] for place in shown]) for row in self.rows]
            return dataclasses.replace(self, columns=[self.columns[place] for place in shown], rows=rows_shown).cells()
        header = [self.name, "seeds"] * bool(self.name) + [column.title for column in self.columns]
        rows: list[list[str]] = []
        for row in self.rows:
            named = [printable(row.label), str(len(row.runs))] * bool(self.name)
            values = zip(self.columns, row.cells, strict=True)
            rows.append([*named, *(column.text(cell, len(row.runs)) for column, cell in values)])
            if row.name in self.published:
                rows.append([f"{row.label}, {self.source}", "", *self._published(row.name)])
        rows += [[name, "", *self._published(name)] for name in self._published_only()]
        if self.transposed:
            header, *rows = map(list, zip(header, *rows, strict=True))
            abouts = [*[{}] * (2 * bool(self.name)), *(column.about for column in self.columns)][1:]
            names = list(dict.fromkeys(name for about in abouts for name in about))
            header[1:1] = names
            for line, about in zip(rows, abouts, strict=True):
                line[1:1] = [_number(about[name]) if name in about else "" for name in names]
        return header, rows

    def markdown(self) -> str:
        """The table in Markdown, under its title."""
        header, rows = self.cells()
        lines = [["", *header[1:]], ["---"] * len(header), *rows]
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |")
        return (f"{self.title}\n\n" if self.title else "") + text

    def csv(self) -> str:
        """The cells, as text, in CSV; a frame has the numbers."""
        header, rows = self.cells(aside=True)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        return text.getvalue()

    def as_json(self) -> list[dict[str, Any]]:
        """The rows; numbers over runs as mean, standard deviation and count, beside the published mean."""
        rows = []
        for row in self.rows:
            pairs = zip(self.columns, row.cells, strict=True)
            metrics = {column.key: self._summary(row, column, cell) for column, cell in pairs}
            named = {"table": self.name, "name": row.name, "seeds": len(row.runs), "metrics": metrics}
            rows.append(named if self.name else metrics)
        return rows

    def frame(self) -> Any:
        """A pandas frame of the rows, and of published ones without runs, in the units of the metrics.

        A column has the mean of several runs; ``…, std`` their standard deviation, ``…, values`` their number, and
        ``…, paper`` the published mean.
        """
        import pandas  # takes a second

        rows = [*self.rows, *(Row([[] for _ in self.columns], name) for name in self._published_only())]
        lines = []
        for row in rows:
            counts = {"seeds": len(row.runs), "missing": row.missing, "failed": row.failed}
            line: dict[str, Any] = counts if self.name else {}
            for column, cell in zip(self.columns, row.cells, strict=True):
                found = self._summary(row, column, cell)
                for part, number in (found if isinstance(found, dict) else {"mean": found}).items():
                    if self.published or "paper" not in part:
                        line[column.title + _ENDINGS[part].format(self.source)] = number
            lines.append(line)
        index = pandas.Index([row.name for row in rows], name=self.name) if self.name else None
        return pandas.DataFrame(lines, index=index)

    def text(self) -> str:
        """The table as a command prints it to a file."""
        file = io.StringIO()
        self._print(file, _WIDTH)
        return file.getvalue()

    def print(self) -> None:
        """Print the table on standard output."""
        self._print(sys.stdout, None if sys.stdout.isatty() else _WIDTH)

    def _print(self, file: Any, width: int | None) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Column as RichColumn
        from rich.table import Table as RichTable

        header, rows = self.cells()
        console = Console(file=file, width=width)
        if self.title:
            print(f"{self.name}: {self.title}", file=file)
        least = _longest_words([header, *rows])
        for block in _blocks(least, console.width):
            columns = [RichColumn(escape(header[place]), min_width=least[place], no_wrap=place == 0) for place in block]
            table = RichTable(*columns, box=SIMPLE_HEAD)
            for row in rows:
                table.add_row(*(escape(row[place]) for place in block))
            console.print(table)

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        header, rows = self.cells()
        lines = [("th", header), *(("td", row) for row in rows)]
        cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in lines)
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"

    def _published_only(self) -> list[str]:
        """The published rows without runs."""
        return [name for name in self.published if name not in {row.name for row in self.rows}]

    def _published(self, name: str) -> list[str]:
        """The cells of a published row as text."""
        found = ((column, self.published[name].get(column.title, "")) for column in self.columns)
        return [cell if isinstance(cell, str) else f"{cell:.{column.digits}f}" for column, cell in found]

    def _summary(self, row: Row, column: Column, cell: Cell) -> Any:
        """Of numbers over runs mean, standard deviation and count, and the published mean; another cell itself."""
        if not isinstance(cell, list):
            return cell
        found = {**mean_and_std(cell), "values": len(cell)}
        if self.name:
            paper = column.published(self.published.get(row.name, {}).get(column.title, ""))
            found |= dict(zip(("paper", "paper_std"), paper, strict=True))
        return found


# Where output is no terminal, rich's default width would break every row.
_WIDTH = 160
# The width that rich adds to each column: its margins and the space to the next.
_BESIDE = 3
# The ends of a frame's headings.
_ENDINGS = {"mean": "", "std": ", std", "values": ", values", "paper": ", {}", "paper_std": ", {} std"}
_Entries = list[tuple[tuple[str, ...], Any]]  # names, one a level, and the value


def _longest_words(lines: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column's longest word; of the first its longest text, since names of rows stay in one line."""
    first, *others = zip(*lines, strict=True)
    words = ((text.replace(" ±", "_±").split() for text in column) for column in others)  # rich keeps the sign there
    return [max(map(len, first)), *(max(len(word) for of_text in each for word in of_text or [""]) for each in words)]


def _blocks(least: Sequence[int], width: int) -> list[list[int]]:
    """The columns that stand beside each other in this width, without a word being cut; the first begins each block."""
    blocks: list[list[int]] = [[0]]
    for place in range(1, len(least)):
        together = [*blocks[-1], place]
        if len(together) > 2 and sum(least[each] + _BESIDE for each in together) >= width:
            blocks.append([0])
        blocks[-1].append(place)
    return blocks


def _number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:.3g}"


def _within(entries: _Entries) -> _Entries:
    """Expand the entries that are mappings by one level."""
    found: _Entries = []
    for names, each in entries:
        if isinstance(each, Mapping) and each:
            found += [((*names, str(name)), inner) for name, inner in each.items()]
        elif names:
            found.append((names, each))
    return found


def format_value(value: Any) -> str:
    """A value of a report or run as text."""
    if isinstance(value, float):  # small values, such as learning rates, keep their digits
        return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return "  ".join(f"{key}: {format_value(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(format_value(entry) for entry in value)
    return str(value)
