"""The benchmark table prints rows as they are measured, and loses none by Ctrl-C or a failing benchmark."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import gpu
import pytest
import torch

from concord import benchmark
from concord.benchmark import benchmark_files
from concord.cli import main
from concord.errors import InputError

BEGINNING = """
from concord.benchmark import Row
def row(name):
    return Row(name, 0.001, "other", 0.002, 0.5, "< 1")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A folder of benchmarks in place of the project's: file names and the bodies of their rows()."""

    def write(**bodies: str) -> Path:
        for name, body in bodies.items():
            path = tmp_path / ("long" if name.startswith("lengthy") else "") / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{BEGINNING}\ndef rows():\n{textwrap.indent(body, '    ')}\n")
        return tmp_path

    monkeypatch.setattr(benchmark, "benchmarks_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write


def test_the_default_leaves_out_what_takes_minutes() -> None:
    quick, everything = ({path.stem for path in benchmark_files("", all_)} for all_ in (False, True))
    assert {"stacked_step", "ddp_hook", "temporal_and_mask"} <= quick
    slow = {"study_trials", "scaling", "per_example_step", "agent_training", "start", "mirror", "sizing", "gpu"}
    assert everything - quick == slow
    assert [path.stem for path in benchmark_files("study")] == ["study_trials"]
    with pytest.raises(InputError, match="--only nothing: no benchmark of this name"):
        benchmark_files("nothing")


def test_rows_come_as_measured_and_a_failing_benchmark_takes_none(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder(
        one_first='yield row("first")\nprint("a benchmark prints")\nyield row("second")',
        one_second='yield row("third")\nraise ValueError("no such device")',
        one_third='return [row("fourth")]',
        lengthy='yield row("of minutes")',
    )
    assert main(["bench", "--json"]) == 1
    said = capsys.readouterr()
    (last,) = said.out.splitlines()
    result = json.loads(last)
    names = ["first", "second", "third", "fourth"]
    assert [row["name"] for row in result["rows"]] == names
    assert result["error"] == "one_second could not be measured (ValueError: no such device)"
    assert [json.loads(line) for line in said.err.splitlines() if line.startswith("{")] == result["rows"]

    assert main(["bench", "--all", "--only", "lengthy"]) == 0
    said = capsys.readouterr()
    assert "of minutes  1.0 ms  other  2.0 ms  0.500  < 1" in said.err
    assert "of minutes" in said.out


def test_a_benchmark_without_its_package_is_left_out_with_a_line(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "not_there", None)  # as where it is not installed
    folder(
        at_once='import not_there.part\nreturn [row("never")]',
        in_between='yield row("before")\nfrom not_there import part',
        last='return [row("another")]',
        wrong="import json.no_such_module",
    )
    for words, names in ((("--only", "at_once"), []), (("--only", "in_between"), ["before"])):
        status = main(["bench", "--json", *words])
        said = capsys.readouterr()
        assert "needs the package not_there, which is not installed" in said.err
        assert status == (0 if names else 2)
        assert [row["name"] for row in json.loads(said.out).get("rows", [])] == names
    assert main(["bench", "--json"]) == 1  # by the fourth, whose package is there
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert [row["name"] for row in result["rows"]] == ["before", "another"]
    assert result["error"] == "wrong could not be measured (ModuleNotFoundError: No module named 'json.no_such_module')"
    for name in ("at_once", "in_between"):
        assert f"left out: {name} needs the package not_there, which is not installed" in said.err.splitlines()


def test_the_rows_of_a_gpu_are_tried_on_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)  # as where it is not installed
    sizes = gpu.Sizes(environments=3, batch=4, hidden=8, images=2, examples=4, wide=8, wide_batch=4, repeats=1)
    rows = list(gpu.measured(sizes, torch.device("cpu")))
    assert [row.target for row in rows] == ["≤ 1.5", "≤ 1.2", "≤ 1.5", "≤ 1.5", "≤ 1.8", "≤ 1.8", "≤ 0.7"]
    assert sum(row.name.endswith("one graph") for row in rows) == 3
    assert all(row.ratio > 0 and row.seconds > 0 for row in rows)
    assert "left out: upgrad needs the package torchjd.aggregation" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_rows_of_a_gpu_are_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "gpu"]) == 2
    assert "gpu: there is no GPU on this machine" in capsys.readouterr().err


def test_ctrl_c_prints_what_there_is(folder: Callable[..., Path]) -> None:
    benchmarks = folder(one='yield row("first")\nimport signal\nsignal.pause()', two='yield row("never")')
    program = (
        f"import sys, pathlib, concord.benchmark as b; b.benchmarks_folder = lambda: pathlib.Path({str(benchmarks)!r})"
    )
    words = [
        sys.executable,
        "-c",
        f"{program}; from concord.cli import entry; sys.argv = ['concord', 'bench', '--json']; entry()",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{"):
            break
    assert json.loads(line)["name"] == "first"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    result = json.loads(out.splitlines()[-1])
    assert [row["name"] for row in result["rows"]] == ["first"]
    assert result["error"] == "stopped"
