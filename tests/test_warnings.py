"""Warnings as the commands show them."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import concord
from concord.environments import from_image_folder
from concord.errors import ArgumentError
from concord.logs import show_warnings_in_one_line

PACKAGE = Path(concord.__file__).parent


@pytest.fixture
def shown() -> Iterator[None]:
    before = warnings.formatwarning
    with warnings.catch_warnings():
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


@pytest.mark.usefixtures("shown")
def test_a_large_image_is_read_without_a_word_and_a_huge_one_refused_in_a_line(tmp_path: Path) -> None:
    for domain in ("north", "south"):
        for name, side in (("cat", 9500), ("dog", 8)):
            (tmp_path / domain / name).mkdir(parents=True)
            Image.new("1", (side, side)).save(tmp_path / domain / name / "a.png")
    with warnings.catch_warnings(record=True) as said:
        images = from_image_folder(tmp_path, size=8)
        assert images["north"].source.take(torch.tensor([0, 1]))[0].shape == (2, 3, 8, 8)
    assert not said
    Image.new("1", (13400, 13400)).save(tmp_path / "south/dog/b.png")
    with pytest.raises(
        ArgumentError, match=r"1 of 5 images cannot be read: south/dog/b.png \(Image size .*remove them"
    ):
        from_image_folder(tmp_path, size=8)
