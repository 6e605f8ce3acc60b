"""The page of a comparison: one file that says what the runs say, asks nothing of the network, and runs nothing."""

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_job import made_job
from tracked import tracked_runs

import concord
from concord.analysis.method_names import method_name
from concord.cli import main
from concord.cli.job_options import read_command
from concord.execution.preflight import preflight
from concord.interface.results import Comparison
from concord.options import option_values
from concord.record import Run
from concord.storage import Folder
from concord.studies.comparison_page import REPORT, comparison_page
from concord.studies.comparison_run import ComparisonResult
from concord.studies.job_tables import LEAVE_ONE_OUT
from concord.studies.leave_one_out import ROWS, left_out_table, plan_leave_one_out, with_choices
from concord.studies.page import Facts, Page, Section
from concord.studies.results import ResultLine
from concord.tracking import Store
from concord.training import Evaluation, load_job

HOSTILE = "<script>alert(1)</script>"
PLACES = ("north", "<img src=x onerror=alert(1)>", "south & west", "east")
VOID = {"meta", "img"}


class Parsed(HTMLParser):
    """A page's elements, its texts, and its tables as lists of rows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, Mapping[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.folded: list[bool] = []  # of each table
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.folded.append("details" in self.open)
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("th", "td"):
            self.tables[-1][-1][-1] = " ".join(self.tables[-1][-1][-1].split())

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.texts.append(data)
        if {"th", "td"} & {*self.open} and "abbr" not in self.open:
            self.tables[-1][-1][-1] += data

    def all(self, tag: str) -> list[Mapping[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def written(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, a comparison on it, and its page."""
    folder = tmp_path_factory.mktemp("page")
    draw = np.random.default_rng(0)
    died = draw.integers(0, 2, 240)
    turned = np.repeat([1, 1, 1, -1], 60)
    frame = pd.DataFrame(
        {
            "hospital": np.repeat(PLACES, 60),
            "age": draw.normal(60, 10, 240) + 5 * died,
            HOSTILE: turned * (2 * died - 1) + draw.normal(0, 0.5, 240),
            "note": [f"Mrs Miller, {number}" for number in draw.random(240)],
            "died": died,
        }
    )
    frame.to_csv(folder / "patients.csv", index=False)
    assert main(["compare", "table", LEAVE_ONE_OUT, *options(folder), "--html", str(folder / "new" / "page.html")]) == 0
    return folder


def options(folder: Path) -> list[str]:
    where = ["--data", str(folder / "patients.csv"), "--output", str(folder / "out")]
    return [
        *where,
        "--environment",
        "hospital",
        "--target",
        "died",
        "--methods",
        "erm",
        "--epochs",
        "1",
        "--seeds",
        "2",
    ]


@pytest.fixture(scope="module")
def page(written: Path) -> Parsed:
    return Parsed((written / "new" / "page.html").read_text())


def test_a_page_refers_to_nothing_outside_and_runs_nothing(page: Parsed) -> None:
    assert page.all("script") == page.all("link") == page.all("iframe") == []
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes), tag
        assert str(attributes.get("src", "data:image/png;base64,")).startswith("data:image/png;base64,")
        assert str(attributes.get("href", "#")).startswith("#")
        assert "style" not in attributes
    (style,) = re.findall("<style>(.*?)</style>", page.html, re.DOTALL)
    assert not re.search(r"url\(|@import", style)


def test_names_of_the_data_are_text(page: Parsed) -> None:
    assert HOSTILE in page.text
    assert PLACES[1] in page.text
    assert len(page.all("img")) == 2


def test_cells_of_text_which_may_be_about_a_person_are_not_quoted(page: Parsed) -> None:
    assert "column note is ignored: text with 240 different values" in page.text
    assert "Miller" not in page.text


def test_every_number_of_the_table_is_the_comparisons(written: Path, page: Parsed) -> None:
    found = concord.load("table", output=written / "out")
    assert isinstance(found, Comparison)
    frame, (header, *rows) = found.frame(), page.tables[0]
    assert header[:3] == ["environment", "rows", "majority share"]
    assert header[3:7] == ["average", "ridge regression", "gradient boosting", "chosen by held-out"]
    names = ["mean", "ridge", "boosting", "chosen by held-out"]
    assert {row[0] for row in rows} == {*PLACES, "mean accuracy", "worst accuracy"}
    for row in rows:
        means = [f"{frame.loc[name, row[0]]:.3f} ± {frame.loc[name, row[0] + ', std']:.3f}" for name in names]
        assert row[3:7] == means
    assert found.verdict is not None
    label = method_name(found.verdict.recommended)
    assert header[7:] == [f"{label}, 95 % interval"]
    for each in found.verdict.environments:
        if each.method == found.verdict.recommended:
            assert each.interval is not None
            (row,) = (row for row in rows if row[0] == each.environment)
            assert row[7] == f"{each.interval.low:.3f} to {each.interval.high:.3f}"
    for line in found.verdict.lines:
        assert line[1:] in page.text
    shares = found.predictions.drop_duplicates(["environment", "row"]).groupby("environment").target
    for name, *about in rows[:4]:
        share = shares.get_group(name).value_counts(normalize=True).max()
        assert about[:2] == ["60", f"{share:.3f}"]


def test_a_page_says_what_the_data_are_and_how_to_repeat_and_use_the_result(written: Path, page: Parsed) -> None:
    assert "Predicting died: will it hold in a new hospital?" in page.text
    assert re.search(rf"{re.escape(HOSTILE)} turns round: east [+-]0\.\d\d;", page.text)
    assert re.search(r"Other measures of \w+", page.text)
    assert "Does it hold? " in page.text
    command = f"concord compare table {LEAVE_ONE_OUT} --seeds 2 --methods erm --data {written / 'patients.csv'}"
    assert command in page.text
    assert f"concord report table {LEAVE_ONE_OUT} --html report.html --output {written / 'out'}" in page.text
    assert "concord train table --data" in page.text
    assert "models:/table@champion" in page.text
    assert "240" in page.text


def test_a_page_can_be_read_by_a_screen_reader(page: Parsed) -> None:
    assert page.all("html")[0]["lang"] == "en"
    assert all(each["alt"] for each in page.all("img"))
    assert {each["scope"] for each in page.all("th")} == {"col", "row"}
    assert all(each["aria-label"] for each in page.all("table"))
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert set(headings[1:]) == {2}
    anchors = {str(each["href"]) for each in page.all("a")}
    assert anchors == {f"#{each['id']}" for each in page.all("h2")}


def test_mlflow_and_python_have_the_same_page(written: Path, tmp_path: Path) -> None:
    content = (written / "new" / "page.html").read_text()
    store = Store.existing(written / "out")
    (group,) = (run for run in tracked_runs(store, "table-comparisons") if run.name == "table")
    local = store.client.download_artifacts(group.run_id, REPORT, str(tmp_path))
    assert Path(local).read_text() == content
    found = concord.load("table", output=written / "out")
    assert isinstance(found, Comparison)
    assert found.html(tmp_path / "again.html").read_text() == content


def test_report_makes_the_page_again_without_training(written: Path, page: Parsed, tmp_path: Path) -> None:
    runs = sorted((written / "out" / "runs").glob("*/events.jsonl"))
    before = [file.read_bytes() for file in runs]
    for words in ([], [LEAVE_ONE_OUT]):
        file = tmp_path / f"page-{len(words)}.html"
        assert main(["report", "table", *words, "--output", str(written / "out"), "--html", str(file)]) == 0
        assert Parsed(file.read_text()).tables == page.tables
    assert [file.read_bytes() for file in runs] == before


def test_a_page_without_the_data_says_so(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = written / "patients.csv", tmp_path / "page.html"
    words = ["report", "table", "--output", str(written / "out"), "--html", str(file)]
    rows = data.read_text()
    try:
        data.write_text(rows.replace("north", "far north"))
        assert main(words) == 0
        assert "The data have changed since the trainings" in Parsed(file.read_text()).text
        data.unlink()
        assert main(words) == 0
    finally:
        data.write_text(rows)
    shown = Parsed(file.read_text())
    assert "The data could not be read for this page" in shown.text
    assert "Which columns hold" not in shown.text
    assert "could not be read" in capsys.readouterr().err


def test_a_page_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    old = Page("old", "", [])
    old.write(file)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        Page("new", "", []).write(file)
    assert file.read_text() == old.html()


@pytest.mark.parametrize("row", ["mean", "and-mask", "ridge"])
def test_the_command_that_trains_a_row_is_accepted_and_gives_its_settings(row: str, tmp_path: Path) -> None:
    places = np.repeat(PLACES, 30)
    frame = pd.DataFrame({"hospital": places, "age": np.arange(120) % 7, "died": np.arange(120) % 2})
    frame.to_csv(tmp_path / "patients.csv", index=False)
    words = [*options(tmp_path)[:8], "--methods", "erm", "and-mask", "--significance", "0.3", "--epochs", "20"]
    command = read_command("compare", load_job("table"), [LEAVE_ONE_OUT, *words], "concord compare")
    plan = plan_leave_one_out(command.job, command.options, command.given)
    trained = plan.train_command(LEAVE_ONE_OUT, row)
    assert ("--significance" in trained) == (row == "and-mask")
    again = read_command("train", load_job("table"), shlex.split(trained)[3:], "concord train").options
    preflight(command.job, again)
    compared = plan.runs[LEAVE_ONE_OUT][list(plan.tables[LEAVE_ONE_OUT].configurations).index(row) * 3 * 4].config
    differing = {"name", "leave_out"} | compared.unused()
    given, recorded = ({**option_values(each), **dict.fromkeys(differing)} for each in (again.resolve(), compared))
    assert given == recorded


def test_passwords_are_hidden() -> None:
    html = Page(
        "t", "", [Section("s", [Facts({"store": "https://me:hush@host/x", "text": "--hub-token=hush"})])]
    ).html()
    assert "hush" not in html
    assert "https://me:***@host/x" in html


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("folder", "is a folder; give a file in it, such as report.html"),
        ("file.txt/page.html", "file.txt is a file, not a folder"),
        ("s3://bucket/page.html", "must be a file on this machine's disk"),
    ],
)
@pytest.mark.parametrize("words", [f"compare table {LEAVE_ONE_OUT}", "compare table methods", "report table"])
def test_a_wrong_path_is_refused_before_anything_is_trained(
    words: str,
    given: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").touch()
    (tmp_path / "patients.csv").write_text("hospital,died,age\na,0,1\nb,1,2\nc,0,3\n")
    if words.startswith("compare"):
        words += " --data patients.csv --environment hospital --target died"
    assert main([*words.split(), "--output", "out", "--html", given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"concord: --html {given}: ")
    assert line.endswith(problem)
    assert not (tmp_path / "out").exists()


def test_a_report_without_a_comparison_names_the_command_that_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "table", "--output", str(tmp_path), "--html", "page.html"]) == 2
    assert f"concord compare table {LEAVE_ONE_OUT} --html page.html makes one" in capsys.readouterr().err


def test_a_submitted_page_needs_an_absolute_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "/data/p.csv", "--environment", "h", "--target", "d", "--html", "page.html"]
    assert main(["submit", "compare", "table", LEAVE_ONE_OUT, *words, "--output", "/runs"]) == 2
    assert "--html page.html: is relative; give the absolute path" in capsys.readouterr().err


@pytest.mark.parametrize("count", [3, 160])
def test_many_environments_are_those_that_stand_out_and_their_quartiles(count: int, tmp_path: Path) -> None:
    shown = Parsed(comparison_page([many(count, tmp_path)], lambda _: None).html())
    first = shown.tables[0]
    if count == 3:
        assert [row[0] for row in first[1:4]] == ["e000", "e001", "e002"]
        return
    assert len(first) < 20
    summary = {row[0]: row[2] for row in first}
    assert summary["e007"] == f"{value(7):.3f}"
    assert summary["median accuracy"] == f"{np.median([value(each) for each in range(count)]):.3f}"
    every = shown.tables[1]
    assert shown.folded[:2] == [False, True]
    assert sum(re.fullmatch(r"e\d+", row[0]) is not None for row in every) == count
    assert {row[0]: row[2] for row in every}["e007"] == f"{value(7):.3f}"
    assert all("open" not in each for each in shown.all("details"))


def value(place: int) -> float:
    return 0.1 if place == 7 else 0.8 + 0.1 * math.sin(place)


def many(count: int, folder: Path) -> ComparisonResult:
    """A comparison of this many environments, as if it had been trained."""
    names = [f"e{place:03d}" for place in range(count)]
    frame = pd.DataFrame({"place": np.repeat(names, 3), "x": range(3 * count), "y": [0, 1, 1] * count})
    frame.to_csv(folder / "rows.csv", index=False)
    words = [LEAVE_ONE_OUT, "--data", str(folder / "rows.csv"), "--environment", "place", "--target", "y"]
    words += ["--seeds", "1", "--methods", "erm,and-mask", "--no-baselines", "--output", str(folder / "out")]
    command = read_command("compare", load_job("table"), words, "concord compare")
    plan = plan_leave_one_out(command.job, command.options, command.given)
    folds = plan.tables[LEAVE_ONE_OUT].folds
    assert folds is not None
    lines = []
    for method in ("mean", "and-mask"):
        values: dict[str, float] = {}
        for place, name in enumerate(names):
            for kind in ("", " (held-out)", " (oracle)"):
                values[name + kind] = value(place) - 0.01 * (method == "and-mask")
            values[name + ROWS] = 3.0
        lines.append(ResultLine(method, 0, values, 1.0, {}))
    table = left_out_table(LEAVE_ONE_OUT, with_choices(lines, folds, 2))
    run = Run.of([Evaluation(1, 1, {})], 0, {"data": str(folder / "rows.csv")})
    run = dataclasses.replace(run, began={"at": 0}, ended={"status": "FINISHED", "at": 1000})
    run.record |= {"store": "sqlite:///mlflow.db", "tracking": {"tags": {}}, "origin": {}, "key": {}}
    runs = {LEAVE_ONE_OUT: {"mean": [run]}}
    return ComparisonResult(
        folder=Folder(folder), plan=plan, tables=[table], runs=runs, finished=1, failed={}, missing={}
    )


def test_a_table_without_folds_and_data_has_the_other_parts(ray_cluster: None, tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {"average": {"aggregator": "mean"}, "AND-mask": {"aggregator": "and-mask"}}
    file = tmp_path / "page.html"
    found = concord.compare(made_job(), rows, seeds=1, epochs=1, output=tmp_path / "out", html=file)
    shown = Parsed(file.read_text())
    header, cells = found.table.cells()
    assert shown.tables[0] == [header, *cells]
    assert "Which columns hold" not in shown.text
    assert "The answer" not in shown.text
    assert "concord.compare(job, 'configurations'" in shown.text
