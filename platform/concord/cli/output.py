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
