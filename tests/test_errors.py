"""Errors of the library name arguments; the command line names its options."""

import pickle
from pathlib import Path

import pytest

from concord.cli import main
from concord.errors import ArgumentError, InputError, format_for_cli, picklable


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
