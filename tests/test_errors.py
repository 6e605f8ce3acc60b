"""Errors of the library name arguments; the command line names its options."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from concord.cli import main
from concord.errors import ArgumentError, InputError, format_for_cli, picklable, printable


@pytest.mark.parametrize(
    ("value", "argument", "option"),
    [
        (2, "some_size=2: too much", "--some-size 2: too much"),
        ((1, 2.5), "some_size=(1, 2.5): too much", "--some-size 1 2.5: too much"),
        ((), "some_size=(): too much", "--some-size: too much"),
        (None, "some_size=None: too much", "--some-size: too much"),
    ],
)
def test_errors_name_arguments_in_the_library_and_options_in_commands(
    value: object, argument: str, option: str
) -> None:
    error = ArgumentError("some_size", value, "too much")
    assert str(error) == argument
    assert format_for_cli(error) == option


@pytest.mark.parametrize("value", [2, (1, 2.5), None, Path("data"), lambda: None])
def test_an_error_of_another_process_still_names_the_option(value: object) -> None:
    error = ArgumentError("some_size", value, "too much")
    there = pickle.loads(pickle.dumps(picklable(error)))
    assert isinstance(there, ArgumentError)
    assert format_for_cli(there) == format_for_cli(error)
    assert format_for_cli(pickle.loads(pickle.dumps(picklable(InputError("a: b"))))) == "a: b"


def test_a_threshold_that_cannot_be_meant_is_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--threshold", "2"], ["--threshold", "2", "--aggregator", "geometric-mean"]):
        assert main(["train", "synthetic", *words]) == 2
        assert capsys.readouterr().err == "concord: --threshold 2.0: the agreement threshold must lie in [0, 1]\n"
    assert main(["train", "synthetic", "--objective", "meta-irm", "--inner-lr", "0"]) == 2
    assert capsys.readouterr().err == "concord: --inner-lr 0.0: must be above 0\n"


@given(st.text(st.characters(codec=None)))
def test_an_error_is_one_line_without_control_characters_whatever_names_are_in_it(name: str) -> None:
    for error in (InputError(name), ArgumentError("test", name, "must be known"), ArgumentError("test", (name,), name)):
        for line in (str(error), format_for_cli(error)):
            assert line.isprintable()
            assert line == line.encode().decode()


@pytest.mark.parametrize("name", ["über", "北", "a b", "x/y", "é\u0301"])
def test_printable_names_stay_as_they_are(name: str) -> None:
    assert printable(name) == str(InputError(name)) == name


@pytest.mark.parametrize("use", ["environment", "level", "column"])
def test_a_line_break_in_a_name_does_not_split_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], use: str
) -> None:
    name = {each: "no\nrth" if each == use else each for each in ("environment", "level", "column")}
    frame = pd.DataFrame({name["column"]: [*range(40)], "e": np.repeat([name["environment"], "b"], 20)})
    frame["died"] = np.resize([name["level"], "yes"], 40)
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert main(["data", "table", "--check", str(tmp_path / "t.csv"), "--environment", "e", "--target", "died"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("no\\nrth" in line for line in lines)
    assert not any(line.startswith("rth") for line in lines)
    words = ["--data", str(tmp_path / "t.csv"), "--environment", "e", "--target", "died", "--test", "so\nuth"]
    assert main(["train", "table", *words, "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("concord: --test so\\nuth: there is no such environment; there are b, ")


AS_ON_WINDOWS = """
import sys
sys.platform = "win32"
sys.modules["fcntl"] = None
from concord.cli import main
assert main(["train", "synthetic"]) == 2
import concord
try:
    concord.train
except concord.InputError as error:
    print(error)
"""


def test_windows_is_refused_in_one_line_before_imports_of_what_it_lacks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AS_ON_WINDOWS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    line = "Concord does not run on Windows; install it in WSL (the command wsl --install)\n"
    assert (done.stdout, done.stderr) == (line, f"concord: {line}")
