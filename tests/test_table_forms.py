"""Claims about tables: every form has the same numbers, whatever the runs and their order."""

import csv
import io
import json
import math
import re
import statistics
from dataclasses import dataclass, field

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from concord.table import Column, Table


@dataclass(frozen=True)
class Finished:
    """What a table needs of a run."""

    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


FAILED = Finished(failure="ValueError: no")
NUMBERS = st.floats(-100, 100) | st.sampled_from([math.nan, math.inf])
RUNS = st.lists(st.just(FAILED) | st.dictionaries(st.sampled_from(["loss", "gap"]), NUMBERS).map(Finished), max_size=5)
ROWS = st.dictionaries(st.sampled_from(["a", "b", "c"]), RUNS, min_size=1)


def table_of(rows: dict[str, list[Finished]], **parts: object) -> Table:
    columns = [Column("loss"), Column("of all", lambda run: run.metrics.get("gap"), digits=1, percent=True)]
    return Table.over("t", columns, rows, missing={"a": 2}, **parts)


def values(runs: list[Finished], metric: str) -> list[float]:
    return [run.metrics[metric] for run in runs if math.isfinite(run.metrics.get(metric, math.nan))]


@given(ROWS)
def test_every_form_has_the_mean_and_spread_of_the_finite_numbers(rows: dict[str, list[Finished]]) -> None:
    table = table_of(rows)
    frame, (header, cells) = table.frame(), table.cells()
    for found, line, (name, runs) in zip(table.as_json(), cells, rows.items(), strict=True):
        finished = sum(run.failure is None for run in runs)
        assert (found["name"], found["seeds"], line[:2]) == (name, finished, [name, str(finished)])
        for heading, metric, scale, digits in (("loss", "loss", 1, 3), ("of all", "gap", 100, 1)):
            own = values(runs, metric)
            as_json, text, row = found["metrics"][heading], line[header.index(heading)], frame.loc[name]
            assert as_json["values"] == row[f"{heading}, values"] == len(own)
            assert table.numbers(name, heading) == [scale * each for each in own]
            if not own:
                assert (as_json["mean"], text) == (None, "–")
                assert pandas.isna(row[heading])
                continue
            assert as_json["mean"] == row[heading] == pytest.approx(statistics.fmean(own))
            assert text.startswith(f"{statistics.mean(scale * each for each in own):.{digits}f}")
            assert text.endswith(f"({len(own)} of {finished})") == (len(own) < finished)
            if len(own) > 1:
                assert as_json["std"] == row[f"{heading}, std"] == pytest.approx(statistics.stdev(own))
                assert f" ± {statistics.stdev(scale * each for each in own):.{digits}f}" in text
            else:
                assert as_json["std"] is None
                assert "±" not in text
    json.dumps(table.as_json(), allow_nan=False)


@given(ROWS)
def test_text_markdown_csv_and_html_have_the_same_cells(rows: dict[str, list[Finished]]) -> None:
    table = table_of(rows, title="a title")
    header, cells = table.cells()
    markdown = table.markdown().splitlines()
    assert markdown[0] == "a title"
    assert [line.strip("| ").split(" | ") for line in markdown[4:]] == cells
    assert list(csv.reader(table.csv().splitlines())) == [header, *cells]
    title, *text = (line for line in table.text().splitlines() if line.strip(" ─"))
    assert title == "t: a title"
    assert ["".join(line.split()) for line in text] == ["".join("".join(line).split()) for line in (header, *cells)]
    in_html = re.findall(r"<t[hd]>(.*?)</t[hd]>", table._repr_html_())
    assert in_html == [cell for line in (header, *cells) for cell in line]


@given(ROWS, st.randoms())
def test_the_order_of_runs_does_not_matter(rows: dict[str, list[Finished]], random: object) -> None:
    shuffled = {name: random.sample(runs, len(runs)) for name, runs in rows.items()}  # type: ignore[attr-defined]
    before, after = table_of(rows), table_of(shuffled)
    assert [line[:2] for line in after.cells()[1]] == [line[:2] for line in before.cells()[1]]
    pandas.testing.assert_frame_equal(after.frame(), before.frame())


@given(ROWS)
def test_missing_and_failed_runs_are_counted(rows: dict[str, list[Finished]]) -> None:
    frame = table_of(rows).frame()
    for name, runs in rows.items():
        failed = runs.count(FAILED)
        counts = (len(runs) - failed, 2 if name == "a" else 0, failed)
        assert tuple(frame.loc[name, ["seeds", "missing", "failed"]]) == counts
    assert len(table_of(rows).runs) == frame["seeds"].sum()


@given(st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_a_published_number_is_in_the_unit_of_the_metric(mean: float, spread: float, percent: bool) -> None:
    scale = 100 if percent else 1
    published = {"a": {"loss": f"{scale * mean} ± {scale * spread}"}, "other": {"loss": scale * mean}}
    columns = [Column("loss", percent=percent), Column("gap")]
    table = Table.over("t", columns, {"a": []}, published=published, source="a paper")
    (row,) = table.as_json()
    paper = {metric: (found["paper"], found["paper_std"]) for metric, found in row["metrics"].items()}
    assert paper == {"loss": pytest.approx((mean, spread)), "gap": (None, None)}
    frame = table.frame()
    assert list(frame["loss, a paper"]) == pytest.approx([mean, mean])
    assert list(frame["seeds"]) == [0, 0]
    labels = [line[0] for line in table.cells()[1]]
    assert labels == ["a", "a, a paper", "other"]
    assert table.cells()[1][1][2:] == [published["a"]["loss"], ""]


def test_a_published_text_that_is_no_number_has_none() -> None:
    assert Column("loss").published("about .3") == (None, None)
    assert Column("loss", percent=True).published("30 ± 4") == pytest.approx((0.3, 0.04))


@given(ROWS)
def test_a_transposed_table_has_the_rows_as_columns(rows: dict[str, list[Finished]]) -> None:
    plain, transposed = table_of(rows), table_of(rows, transposed=True)
    (header, cells), (first, others) = plain.cells(), transposed.cells()
    assert [list(line) for line in zip(first, *others, strict=True)] == [header, *cells]
    assert transposed.as_json() == plain.as_json()
    pandas.testing.assert_frame_equal(transposed.frame(), plain.frame())


def test_a_single_number_and_what_an_oracle_chose_are_marked() -> None:
    columns = [Column("ood_accuracy", oracle=True), Column("trial", lambda run: 3)]
    table = Table.of(columns, [Finished({"ood_accuracy": 0.91239})])
    assert table.cells() == (["ood_accuracy (oracle)", "trial"], [["0.9124", "3"]])
    assert table.as_json() == [{"ood_accuracy": 0.91239, "trial": 3}]
    assert table.frame().to_dict("records") == [{"ood_accuracy (oracle)": 0.91239, "trial": 3}]


def test_brackets_in_headings_and_cells_are_no_markup() -> None:
    heading, line, cell = Table.plain(["[bold]"], [["[red]"]]).text().split()
    assert (heading, set(line), cell) == ("[bold]", {"─"}, "[red]")


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ({"a": {"x": 0.5, "y": [1, 2]}, "b": {"y": 3}}, [["title", "x", "y"], ["a", "0.500", "1 2"], ["b", "", "3"]]),
        (
            {"levels": 5, "made": {"by": {"game": "coinrun"}}, "none": {}},
            [["title", ""], ["levels", "5"], ["made, by, game", "coinrun"], ["none", ""]],
        ),
        ({"a": {"b": {"x": 0.01}, "c": {"x": 1.0}}}, [["title", "", "x"], ["a", "b", "0.01"], ["a", "c", "1.000"]]),
    ],
)
def test_a_mapping_has_a_column_for_each_innermost_key(value: dict[str, object], rows: list[list[str]]) -> None:
    header, cells = Table.nested("title", value).cells()
    assert [header, *cells] == rows


@given(st.integers(1, 40), st.integers(60, 200), st.sampled_from([0.812, 71.25, 1234.5]))
def test_no_number_is_cut_however_many_columns_there_are(count: int, width: int, value: float) -> None:
    """What does not fit beside the others follows below, with the names of the rows again."""
    columns = [Column(f"method {number}", "loss") for number in range(count)]
    runs = [Finished({"loss": value}), Finished({"loss": value + 0.1})]
    table = Table.over("environment", columns, {"Cleveland": runs, "Long Beach": runs})
    file = io.StringIO()
    table._print(file, width)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert len(re.findall(rf"\b{re.escape(f'{value + 0.05:.3f}')}\b", text)) == 2 * count
    assert text.count("Cleveland") == text.count("Long Beach") >= 1
