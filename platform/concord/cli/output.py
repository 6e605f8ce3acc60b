"""What commands print: lines of progress, tables, and never a password."""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from concord import logs
from concord.redaction import redact


def say(line: str) -> None:
    """A line of progress."""
    if logs.as_json():
        logs.write(line)
    else:
        print(line, file=sys.stderr, flush=True)


def complain(line: str) -> None:
    """What went wrong."""
    if logs.as_json():
        logs.write(line, logging.ERROR)
    else:
        print(line, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*header, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(escape, row))
    # Where output is no terminal, a narrow default width would break every row.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def nested_table(title: str, value: Mapping[Any, Any]) -> None:
    """A mapping, of mappings perhaps, as a table on standard output.

    What all innermost mappings are about becomes the columns, and their names, level by level, begin the rows. Where
    not every entry is as deep as the others, each value has a row of its own.
    """
    entries: list[tuple[tuple[str, ...], Any]] = [((str(name),), each) for name, each in value.items()]
    levels = [entries]
    while entries and all(isinstance(each, Mapping) and each for _, each in entries):
        entries = _within(entries)
        levels.append(entries)
    if len(levels) == 1:
        while any(isinstance(each, Mapping) and each for _, each in entries):
            entries = _within(entries)
        table([title, ""], [[", ".join(path), shown(each)] for path, each in entries])
        return
    columns = dict.fromkeys(path[-1] for path, _ in levels[-1])
    rows = []
    for path, each in levels[-2]:
        cells = {str(name): shown(cell) for name, cell in each.items()}
        rows.append([*path, *(cells.get(column, "") for column in columns)])
    table([title, *[""] * (len(levels) - 2), *columns], rows)


def _within(entries: Sequence[tuple[tuple[str, ...], Any]]) -> list[tuple[tuple[str, ...], Any]]:
    """What is in those entries that are mappings, and the others as they are."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for path, each in entries:
        if isinstance(each, Mapping) and each:
            found += [((*path, str(name)), inner) for name, inner in each.items()]
        else:
            found.append((path, each))
    return found


def shown(value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, float):  # small ones, such as learning rates, keep their digits
        return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return "  ".join(f"{key}: {shown(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(shown(entry) for entry in value)
    return str(value)


def without_passwords(text: str) -> str:
    """The text, its passwords and tokens replaced."""
    return redact(text)
