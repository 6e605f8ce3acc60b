"""How errors name a row of a table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowNames:
    """Names a row by its number among the data rows, from 1: a header does not count, in a folder other files neither.

    Attributes:
        files: of a folder, the name of each file with the place of its first row among all.
    """

    files: tuple[tuple[str, int], ...] = ()

    def __call__(self, place: int) -> str:
        """The name of the row at a place among all, from 0."""
        for name, first in reversed(self.files):
            if place >= first:
                return f"data row {place - first + 1} of {name}"
        return f"data row {place + 1}"


OF_ONE_FILE = RowNames()
