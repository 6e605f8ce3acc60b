"""Output of commands: lines of progress, and tables."""

import logging
import select
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from concord import logs


def info(line: str, level: int = logging.INFO) -> None:
    """Print a line of progress, or of an error."""
    if logs.as_json():
        logs.write(line, level)
    else:
        print(line, file=sys.stderr, flush=True)


def output_closed() -> bool:
    """Whether the reader of standard output or error has ended, as ``head`` does."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    first, *others = header  # keep the rows' names in one line
    table = Table(Column(first, no_wrap=True), *others, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(escape, row))
    # If output is not a terminal, rich's default width would break every row.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def show(parts: Sequence[str | tuple[Sequence[str], Sequence[Sequence[str]]] | Mapping[str, Any]]) -> None:
    """Print lines, tables, and mappings as tables by title."""
    for part in parts:
        if isinstance(part, str):
            print(part)
        elif isinstance(part, Mapping):
            for title, value in part.items():
                nested_table(title, value)
        else:
            table(*part)


_Entries = list[tuple[tuple[str, ...], Any]]  # names, one a level, and the value


def nested_table(title: str, value: Mapping[Any, Any]) -> None:
    """Print a mapping, perhaps nested, as a table.

    The keys of the innermost mappings become columns, and the outer keys begin the rows, one column a level. If depths
    differ, each value has a row of its own.
    """
    outer: _Entries = [((), value)]
    inner = _within(outer)
    while inner and all(isinstance(each, Mapping) and each for _, each in inner):
        outer, inner = inner, _within(inner)
    levels = len(outer[0][0])
    if levels == 0:
        while any(isinstance(each, Mapping) and each for _, each in inner):
            inner = _within(inner)
        table([title, ""], [[", ".join(names), format_value(each)] for names, each in inner])
        return
    columns = dict.fromkeys(names[-1] for names, _ in inner)
    rows = []
    for names, each in outer:
        cells = {str(name): format_value(cell) for name, cell in each.items()}
        rows.append([*names, *(cells.get(column, "") for column in columns)])
    table([title, *[""] * (levels - 1), *columns], rows)


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
    """A value as text for a table."""
    if isinstance(value, float):  # small values, such as learning rates, keep their digits
        return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return "  ".join(f"{key}: {format_value(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(format_value(entry) for entry in value)
    return str(value)
