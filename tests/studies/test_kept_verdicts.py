"""A kept comparison's recommendation is judged by environments that had no part in it."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from concord.analysis.uncertainty import Verdict, verdict
from concord.studies.environment_folds import folds_of
from concord.studies.leave_one_out import HELD_OUT
from concord.studies.results import ResultLine
from concord.training.options import as_names
from documents import with_tables
from table_verdicts import FILE, nested

NAMES = tuple(f"s{number:02}" for number in range(15))


def line(method: str, values: dict[str, float], seed: int = 0) -> ResultLine:
    held_out = {name + HELD_OUT: 0.5 for name in values}
    return ResultLine(method, seed, values | held_out, 1.0, {})


def found(lines: list[ResultLine]) -> Verdict:
    values = {each.configuration: {name: [each.values[name]] for name in NAMES} for each in lines}
    judged = verdict(values, "accuracy", "max")
    assert judged is not None
    return judged


def accuracies(level: float, seed: int) -> dict[str, float]:
    noise = np.random.default_rng(seed).normal(0, 0.003, len(NAMES))
    return {name: level + each for name, each in zip(NAMES, map(float, noise), strict=True)}


def test_a_method_that_is_better_everywhere_is_recommended_without_each_fold() -> None:
    lines = [line("mean", accuracies(0.7, 1)), line("ridge", accuracies(0.8, 2))]
    assert nested(lines, found(lines)) == {
        "value": pytest.approx(statistics.fmean(lines[1].values[name] for name in NAMES)),
        "methods": ["ridge"] * 5,
    }


def test_a_method_that_one_fold_alone_recommends_does_not_count_there() -> None:
    """It is far better in one fold, and slightly better elsewhere: without that fold nothing speaks for it."""
    best = set(as_names(folds_of(NAMES, 0, 0)[2]))
    mean, ridge = accuracies(0.7, 1), accuracies(0.7, 2)
    ridge = {name: value + (0.2 if name in best else 0.0) for name, value in ridge.items()}
    lines = [line("mean", mean), line("ridge", ridge)]
    judged = nested(lines, found(lines))
    assert judged["methods"][2] == "mean"
    taken = [
        (mean if method == "mean" else ridge)[name]
        for method, part in zip(judged["methods"], folds_of(NAMES, 0, 0), strict=True)
        for name in as_names(part)
    ]
    assert judged["value"] == pytest.approx(statistics.fmean(taken))


def test_a_document_shows_a_kept_verdict(tmp_path: Path) -> None:
    lines = [line("mean", accuracies(0.7, 1)), line("ridge", accuracies(0.8, 2))]
    judged = found(lines)
    kept = {"name": "Fifteen", **judged.as_json(), "without its fold": nested(lines, judged), "folds": 5, "count": 15}
    kept["seeds"] = 1
    (tmp_path / FILE).write_text(json.dumps(kept) + "\n")
    shown = with_tables("<!-- results: table verdicts -->\n<!-- end of results -->", tmp_path)
    row = next(each for each in shown.splitlines() if "Fifteen" in each)
    assert "15, 5 folds" in row
    assert "ridge regression 0.8" in row
    assert "better" in row
