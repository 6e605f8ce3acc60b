"""Warnings as the commands show them."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image

import concord
from concord.environments import from_image_folder
from concord.environments.table import from_table
from concord.errors import ArgumentError, InputWarning
from concord.logs import context, inherit_context, show_warnings_in_one_line

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
def test_what_to_know_of_the_input_is_said_once_in_one_line_and_not_by_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(message: Warning | str, category: type[Warning], file: str, line: int, *_: object) -> None:
        print(warnings.formatwarning(message, category, file, line), end="")

    monkeypatch.setattr(warnings, "showwarning", show)  # as without pytest, which keeps warnings
    frame = pd.DataFrame(
        {"place": ["a", "b", "c"] * 20, "x": [0.5, 1.5] * 30, "y": [None] + ["no", "yes"] * 29 + ["no"]}
    )

    def read() -> str:
        from_table(frame, target="y", environment="place")
        return capsys.readouterr().out

    assert read() == "warning: 1 of 60 rows have no y and are left out\n"
    with warnings.catch_warnings():  # after which Python has forgotten what it showed
        warnings.simplefilter("ignore", DeprecationWarning)
    assert read() == ""
    warnings.simplefilter("always", InputWarning)
    assert read() != ""
    inherit_context(context())
    assert read() == ""


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
