"""The result of a command, in the form that tests read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from concord.cli import main


@dataclass(frozen=True)
class Said:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        (line,) = self.out.splitlines()
        return json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


Concord = Callable[..., Said]


def outcome(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit status and JSON of a command in the present folder."""
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def files(folder: Path) -> set[str]:
    """The files in a folder, without Python's bytecode."""
    return {str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts}
