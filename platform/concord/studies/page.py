"""A page to hand on: one HTML file for a browser, a phone and a printer, which needs no network and no script.

A page is sections of typed parts, and the template ``page.html`` knows how each kind of part looks. Every text is
escaped and freed of passwords where the template prints it.
"""

import base64
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from concord.errors import InputError
from concord.redaction import redact
from concord.storage import Folder, display_path, is_remote

MOST_ROWS = 20  # of a grid; the others are folded
MOST_NAMED = 8  # things in a sentence
_MOST_PRINTED = 60  # folded rows


Mark = Literal["", "best", "below"]
"""Of a value: the best of its row, or worse than a constant."""


class Cell(NamedTuple):
    """A cell of a grid."""

    text: str
    mark: Mark = ""


def cells_of(texts: Iterable[str]) -> list[Cell]:
    """Cells without marks."""
    return [Cell(text) for text in texts]


@dataclass(frozen=True)
class Grid:
    """A table; the first cell of a row names it.

    Attributes:
        caption: what the numbers are.
        footer: rows below a line, of all others together.
        numeric: whether the cells after the first are numbers, which stand to the right.
    """

    kind: ClassVar = "grid"
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    footer: Sequence[Sequence[Cell]] = ()
    numeric: bool = True


@dataclass(frozen=True)
class Lines:
    """Sentences, one below the other; ``lead`` are the page's answer."""

    kind: ClassVar = "lines"
    lines: Sequence[str]
    lead: bool = False


@dataclass(frozen=True)
class Facts:
    """Terms with what they are."""

    kind: ClassVar = "facts"
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Picture:
    """A PNG; ``text`` says what it shows, also to who cannot see it."""

    kind: ClassVar = "picture"
    png: bytes
    text: str

    @property
    def uri(self) -> str:
        """The picture inside the page."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True)
class Command:
    """Lines for a shell or Python, and what they do."""

    kind: ClassVar = "command"
    text: str
    lines: str


@dataclass(frozen=True)
class Folded:
    """Parts that a reader opens; on paper they are open, or left out if they are long."""

    kind: ClassVar = "folded"
    title: str
    parts: Sequence["Part"]

    @property
    def printed(self) -> bool:
        """Whether they are on paper."""
        return sum(len(part.rows) for part in self.parts if isinstance(part, Grid)) <= _MOST_PRINTED


Part = Grid | Lines | Facts | Picture | Command | Folded


@dataclass(frozen=True)
class Section:
    """Parts under a heading; one without parts is left out."""

    heading: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """The page; ``about`` is a line below its title."""

    title: str
    about: str
    sections: Sequence[Section]

    def html(self) -> str:
        """The page as one file."""
        html: str = _template().render(page=self)
        return html

    def write(self, file: Path) -> None:
        """Write the file, of which a reader never sees half."""
        write_file(file, self.html())


def write_file(file: Path, html: str) -> None:
    """Replace a page at once, in a folder that may be missing."""
    file = file.absolute()
    Folder(file.parent).write(file.name, html)


def check_page_file(file: Path | None) -> None:
    """Refuse a ``--html`` that cannot be written on this machine (InputError), before anything is trained for it."""
    if file is None:
        return

    def refuse(problem: str) -> None:
        raise InputError(f"--html {display_path(file)}: {problem}")

    if is_remote(file):
        refuse("must be a file on this machine's disk")
    if file.is_dir():
        refuse("is a folder; give a file in it, such as report.html")
    folder = next(each for each in file.absolute().parents if each.exists())
    if not folder.is_dir():
        refuse(f"{folder} is a file, not a folder")
    if not os.access(folder, os.W_OK):
        refuse(f"{folder} is not a writable folder")


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape  # a tenth of a second

    environment = Environment(
        loader=PackageLoader("concord", "studies"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: redact(value) if type(value) is str else value,  # a macro's result is Markup
    )
    return environment.get_template("page.html")
