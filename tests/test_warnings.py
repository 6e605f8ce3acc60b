"""Warnings as the commands show them."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import concord
from concord.logs import show_warnings_in_one_line

PACKAGE = Path(concord.__file__).parent


@pytest.fixture
def shown() -> Iterator[None]:
    before = warnings.formatwarning
    show_warnings_in_one_line()
    yield
    warnings.formatwarning = before


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("text", ["the penalty changes nothing", "two\nlines", "  spaces  "])
def test_a_warning_of_the_package_is_one_line_without_its_place(text: str) -> None:
    line = warnings.formatwarning(UserWarning(text), UserWarning, str(PACKAGE / "objectives" / "coral.py"), 30)
    assert line == f"warning: {' '.join(text.split())}\n"


@pytest.mark.usefixtures("shown")
def test_a_warning_of_other_code_keeps_its_place() -> None:
    line = warnings.formatwarning(RuntimeWarning("overflow"), RuntimeWarning, "/home/me/job.py", 7, "x = a / b")
    assert line == "/home/me/job.py:7: RuntimeWarning: overflow\n  x = a / b\n"
