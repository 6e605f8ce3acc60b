"""Which results of the papers come out, computed from kept rows and from ``docs/results/papers.yaml``.

An item of that file has one kind of evidence:

``holds``
    Statements about kept rows, such as ``[ROW; COLUMN] > 0.95``, ``[ROW; COLUMN] = 70.4 ± 4`` and
    ``[ROW; COLUMN] < [ROW; COLUMN]``. A cell of another table than ``rows`` ends with ``; JOB TABLE``. A cell is its
    mean over the seeds of the item's protocol, ``max [...]`` and ``min [...]`` its largest and smallest value.
    ``[Adam *; COLUMN]`` has the runs of all rows whose names begin with ``Adam ``. One mean is less than another if
    they differ by more than two standard errors, over seeds or over all these runs. ``protocol`` is what is equal for
    all of the item's rows.
``test``
    Tests of an exact statement, a rule or a figure; ``without`` names what they lack.
``verdict``
    ``rows not kept``, ``not run``, ``definition`` or ``schematic``; with ``holds`` it applies until rows are kept.
"""

import datetime
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from concord.analysis.method_names import method_name
from concord.analysis.spread import with_spread
from concord.errors import InputError
from concord.table import Table
from kept_results import read_table

OUT, SMALLER, PARTLY, NOT = "comes out", "comes out, smaller", "partly", "does not come out"
TESTED, NOT_KEPT = "tested", "rows not kept"
VERDICTS = (OUT, SMALLER, PARTLY, NOT, TESTED, NOT_KEPT, "not run", "definition", "schematic")
FAILS, NO_ROWS = "not", "no rows for"  # before a statement
HEADER = ["item", "what it shows", "ours", "the paper's", "protocol", "size against the paper's", "verdict", "command"]
_SIDE = r"(?:(?:max|min) )?\[[^\]]+\]|-?[\d.]+"
_STATEMENT = re.compile(rf"({_SIDE}) ([<>=]) ({_SIDE})(?: ± ([\d.]+))?")
_WHICH = re.compile(r" --(?:seeds|first-seed|only)(?: (?:'[^']*'|(?!--)\S+))+")  # which runs, not how large they are
_REDUCED = re.compile(r"concord compare .*?(--.*)")  # the options of a comparison


class Side(NamedTuple):
    """One side of a statement: a number, or a cell with its heading, text, number of seeds, and options of its runs."""

    value: float
    error: float = 0.0
    heading: str = ""
    shown: str = ""
    seeds: int = 0
    options: str = ""


@dataclass(frozen=True)
class Protocol:
    """How the runs of an item were made, the same for all of its rows, and fixed before a verdict is read.

    Attributes:
        seeds: their number, the first ones of each row; seeds that were added later count nowhere.
        length: the steps or epochs of every row.
        settings: whose they are, or what chose them.
        fixed: the day on which the protocol was written.
        unequal: rows of another length, and why that is no fault.
    """

    seeds: int
    length: str
    settings: str
    fixed: datetime.date
    unequal: str = ""

    def __str__(self) -> str:
        unequal = f" ({self.unequal})" if self.unequal else ""
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        return f"{seeds}; {self.length}{unequal}; settings: {self.settings}; fixed {self.fixed}"


@dataclass(frozen=True)
class Item:
    """A figure, table or statement of a paper, as in the file of papers.

    Attributes:
        item, shows, paper: its name, what it shows, and the paper's result.
        table: reads a job's table of kept rows.
        rows: ``JOB TABLE`` of the cells.
        holds, test, verdict: the evidence.
        protocol: of ``holds``.
        seeds: the paper's number of seeds, if it gives one.
        smaller, without: what is smaller than in the paper, or missing.
        note: another difference.
        ours: a result of ours that no row shows.
        page: the section of the documents.
        command: what to paste, if not ``concord compare JOB TABLE`` or the test.
    """

    item: str
    shows: str
    table: Callable[[str, str], Table]
    paper: str = ""
    rows: str = ""
    holds: Sequence[str] = ()
    test: Sequence[str] = ()
    verdict: str = ""
    protocol: Protocol | None = None
    seeds: int = 0
    smaller: str = ""
    without: str = ""
    note: str = ""
    ours: str = ""
    page: str = ""
    command: Sequence[str] = ()

    @cached_property
    def statements(self) -> Mapping[str, tuple[str, Sequence[Side]]]:
        """Why each statement does not hold (nothing if it does), and its sides."""
        return {text: self._decide(text) for text in self.holds}

    @cached_property
    def kept(self) -> Sequence[Side]:
        """The cells with kept rows, each once."""
        sides = [side for _, cells in self.statements.values() for side in cells if side.seeds]
        return list({(side.heading, side.shown): side for side in sides}.values())

    @property
    def judged(self) -> str:
        """The verdict that the evidence allows."""
        if not self.kept:
            return self.verdict or (NOT_KEPT if not self.test else PARTLY if self.without else TESTED)
        reasons = {reason for reason, _ in self.statements.values()}
        if reasons != {""}:
            return PARTLY if "" in reasons else NOT if FAILS in reasons else NOT_KEPT
        return SMALLER if self.smaller or self._reduced else OUT

    def line(self) -> list[str]:
        """The item's line on the page."""
        named = f"[{self.item}]({self.page})" if self.page else self.item
        commands = self.command or ([f"concord compare {self.rows}"] if self.rows else [])
        pasted = "<br>".join(f"`{each}`" for each in [*commands, *(f"pytest {test}" for test in self.test)])
        failing = (f"{reason} `{text}`" for text, (reason, _) in self.statements.items() if reason and self.kept)
        verdict = "; ".join([self.judged, *failing])
        protocol = str(self.protocol or "")
        cells = [named, self.shows, self._ours(), self.paper, protocol, self._size(), verdict, pasted]
        return [cell or "–" for cell in cells]

    def _decide(self, text: str) -> tuple[str, Sequence[Side]]:
        parts = _STATEMENT.fullmatch(text)
        if not parts or (parts[2] == "=") != bool(parts[4]):
            raise InputError(f"{self.item}: {text}: must read like [ROW; COLUMN] > 0.95, or = 0.95 ± 0.1")
        left, right = self._side(parts[1]), self._side(parts[3])
        difference = left.value - right.value
        noise = 2 * math.hypot(left.error, right.error) if left.heading and right.heading else 0.0
        holds = {"<": difference < -noise, ">": difference > noise, "=": abs(difference) <= float(parts[4] or 0)}
        return "" if holds[parts[2]] else NO_ROWS if math.isnan(difference) else FAILS, (left, right)

    def _side(self, text: str) -> Side:
        if "[" not in text:
            return Side(float(text))
        row, heading, *other = text[text.index("[") + 1 : -1].split("; ")
        table = self.table(*(other[0] if other else self.rows).split(" "))
        names = [each.name for each in table.rows]
        rows = [each for each in names if each == row or (row[-2:] == " *" and each.startswith(row[:-1]))]
        column = next((each for each in table.columns if each.title == heading), None)
        if not rows or column is None:
            raise InputError(f"{self.item}: {text}: no such row or column")
        assert self.protocol is not None
        by_row = [table.numbers(each, heading)[: self.protocol.seeds] for each in rows]
        values = [value for each in by_row for value in each]
        heading = " in ".join([heading, *other])
        if not all(by_row):
            return Side(math.nan, heading=heading)
        of = {"max": max, "min": min}.get(text[:3])
        error = 0.0 if of or len(values) < 2 else statistics.stdev(values) / math.sqrt(len(values))
        fewer = {len(each) for each in by_row} - {self.protocol.seeds}
        counted = f" ({' to '.join(map(str, sorted(fewer)))} of {self.protocol.seeds} seeds)" if fewer else ""
        shown = f"{method_name(row)}: {with_spread(values, column.digits)}{counted}"
        commands = {line.origin["command"] for line in table.runs if line.configuration in rows}
        reduced = [found[1] for each in sorted(commands) if (found := _REDUCED.search(_WHICH.sub("", each)))]
        options = ", ".join(dict.fromkeys(reduced))
        return Side((of or statistics.fmean)(values), error, heading, shown, min(map(len, by_row)), options)

    @property
    def _reduced(self) -> list[str]:
        """The missing seeds, and the options with which runs were made smaller."""
        fewest = min((side.seeds for side in self.kept), default=self.seeds)
        fewer = [f"{fewest} of {self.seeds} seeds"] if fewest < self.seeds else []
        return [*fewer, *dict.fromkeys(f"`{side.options}`" for side in self.kept if side.options)]

    def _ours(self) -> str:
        headings = dict.fromkeys(side.heading for side in self.kept)
        shown = {each: "; ".join(side.shown for side in self.kept if side.heading == each) for each in headings}
        return "<br>".join([*(f"{heading} · {cells}" for heading, cells in shown.items()), *filter(None, [self.ours])])

    def _size(self) -> str:
        without = f"without {self.without}" if self.without else ""
        differing = filter(None, [*self._reduced, self.smaller, without, self.note])
        return "; ".join(differing) or ("the paper's" if self.judged in (OUT, TESTED) else "")


Papers = Mapping[str, Sequence[Item]]
"""The items of each paper."""


def read_papers(results: Path) -> Papers:
    """The items of the file of papers in the folder of results, with their kept rows."""
    table = cache(partial(read_table, results=results))
    papers = yaml.safe_load((results / "papers.yaml").read_text(encoding="utf-8"))
    return {paper: [_item(table, entry) for entry in items] for paper, items in papers.items()}


def _item(table: Callable[[str, str], Table], entry: Mapping[str, Any]) -> Item:
    protocol = Protocol(**entry["protocol"]) if entry.get("protocol") else None
    return Item(table=table, **{**entry, "protocol": protocol})


def _counts(items: Sequence[Item]) -> list[int]:
    return [sum(each.judged == verdict for each in items) for verdict in VERDICTS]


def _items(papers: Papers) -> str:
    """A line for each item, in a table for each paper."""
    tables = (
        f"## {paper}\n\n{Table.plain(HEADER, [each.line() for each in papers[paper]]).markdown()}" for paper in papers
    )
    return "\n" + "\n".join(tables)


def _summary(papers: Papers) -> str:
    """The number of items with each verdict, by paper."""
    rows = [[paper, *map(str, _counts(items))] for paper, items in papers.items()]
    return f"\n\n{Table.plain(['', *VERDICTS], rows).markdown()}"


def _sentence(papers: Papers) -> str:
    """The same for all papers together."""
    items = [item for part in papers.values() for item in part]
    out, smaller, partly, no, tested, lost, never, *drawn = _counts(items)
    kept = f"of {lost} no rows are kept, " if lost else ""
    return (
        f"of the papers' {len(items)} items {out} come out at full size, {smaller} in smaller runs, {partly} partly, "
        f"{no} do not; {tested} are exact or drawn, and tested; {kept}{never} were not run, "
        f"{sum(drawn)} are definitions or schematic"
    )


PARTS: Mapping[str, Callable[[Papers], str]] = {"items": _items, "summary": _summary, "sentence": _sentence}
