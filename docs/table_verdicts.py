"""Keeps comparisons of methods on tables: the lines of each, and its verdict with its intervals.

``python docs/table_verdicts.py OUTPUT JOB TABLE RESULTS`` reads the comparison in the folder OUTPUT, and writes
``RESULTS/JOB-TABLE.jsonl`` and its line in ``RESULTS/table-verdicts.jsonl``. TABLE is ``leave-one-out``, or
``leave-one-out-NAME`` if the job has several.
"""

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import concord
from concord.analysis.method_names import method_name
from concord.analysis.uncertainty import Verdict, verdict
from concord.studies.environment_folds import folds_of
from concord.studies.job_tables import LEAVE_ONE_OUT
from concord.studies.leave_one_out import CHOSEN, CONSTANT, HELD_OUT, MAJORITY, ORACLE, ROWS
from concord.studies.methods import KNOWN
from concord.studies.results import ResultLine, write_lines
from concord.table import Column, Row, Table
from concord.training.declared_measures import Mode
from concord.training.options import as_names

FILE = "table-verdicts.jsonl"
_KNOWN = (ROWS, MAJORITY, CONSTANT)
BASELINES = ("ridge", "boosting")
_SHOWN = 20  # of more environments the file leaves the values of single ones to the lines


def main(words: Sequence[str]) -> int:
    """Keep a comparison."""
    output, job, table, results = words
    comparison = concord.load(job, output=output)
    assert isinstance(comparison, concord.interface.results.Comparison)
    found = comparison.verdict
    assert found is not None
    lines = comparison.tables[LEAVE_ONE_OUT].runs
    folds = _folds(lines)
    write_lines(_shortened(lines), Path(results), job, table)
    kept = found.as_json()
    if len(folds.names) > _SHOWN:
        kept["environments"] = []
    kept["seeds"] = len({line.seed for line in lines})
    kept |= {"without its fold": nested(lines, found), "folds": len(folds.parts), "count": len(folds.names)}
    file, name = Path(results) / FILE, table.removeprefix(LEAVE_ONE_OUT).removeprefix("-")
    name = name if job == "table" else f"{job} {name}".strip()
    before = [each for each in read_verdicts(Path(results)) if each["name"] != name]
    after = [*before, {"name": name, "job": job, **kept}]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in after), encoding="utf-8")
    return 0


def _shortened(lines: Sequence[ResultLine]) -> Iterator[ResultLine]:
    """The lines with five digits, and what is known of the environments in the first one alone."""
    for place, line in enumerate(lines):
        kept = {name: value for name, value in line.values.items() if place == 0 or not name.endswith(_KNOWN)}
        yield dataclasses.replace(line, values={name: float(f"{value:.5g}") for name, value in kept.items()})


def read_verdicts(results: Path) -> list[dict[str, Any]]:
    """The kept verdicts."""
    file = results / FILE
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


@dataclasses.dataclass(frozen=True)
class _Folds:
    names: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]


def _folds(lines: Sequence[ResultLine]) -> _Folds:
    """The environments of these lines, and those that were left out together."""
    headings = dict.fromkeys(heading for line in lines for heading in line.values)
    names = tuple(heading.removesuffix(HELD_OUT) for heading in headings if heading.endswith(HELD_OUT))
    return _Folds(names, tuple(map(as_names, folds_of(names, 0, min(line.seed for line in lines)))))


def nested(lines: Sequence[ResultLine], found: Verdict) -> dict[str, Any]:
    """The recommended method's mean if each fold's environments had no part in the recommendation, and its methods.

    The models that judge it have trained on that fold's environments, as the models of the other folds always have.
    """
    folds, mode = _folds(lines), _mode(found)
    values: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        if line.configuration != CHOSEN and not line.configuration.endswith(ORACLE):
            of_method = values.setdefault(line.configuration, {})
            for name in folds.names:
                if name in line.values:
                    of_method.setdefault(name, []).append(line.values[name])
    each, methods = list[float](), list[str]()
    for part in folds.parts:
        others = {
            method: {name: of[name] for name in of if name not in part} for method, of in values.items() if len(of) > 1
        }
        without = verdict(others, found.measure, mode)
        assert without is not None
        methods.append(without.recommended)
        of = values[without.recommended]
        each += [statistics.fmean(of[name]) for name in part if name in of and name not in found.left_out]
    return {"value": statistics.fmean(each), "methods": methods}


def _mode(found: Verdict) -> Mode:
    """Whether the first of its methods, the best, has the largest value."""
    return "max" if found.methods[0].value >= found.methods[-1].value else "min"


def verdicts_table(results: Path) -> Table:
    """A row for each kept table: the average, the best baseline, the recommended method and the best in hindsight."""
    columns = [Column(heading, read) for heading, read in _COLUMNS.items()]
    kept = read_verdicts(results)
    return Table(columns, [Row([column.of(each) for column in columns], each["name"]) for each in kept])


def means_table(results: Path) -> Table:
    """The mean over the environments of each method that all kept tables have, a row for each table."""
    kept = read_verdicts(results)
    means = {each["name"]: {of["method"]: of["value"] for of in each["methods"]} for each in kept}
    methods = [method for method in KNOWN if all(method in found for found in means.values())]
    methods += [method for method in BASELINES if any(method in found for found in means.values())]
    rows = [
        [name, *(_number(found[method]) if method in found else "–" for method in methods)]
        for name, found in means.items()
    ]
    return Table.plain(["table", *map(method_name, methods)], rows)


def ratios_line(results: Path) -> str:
    """The error of the recommendation without its fold against that of others, as a mean ratio over the tables."""
    ratios: dict[str, list[float]] = {}
    for each in read_verdicts(results):
        of = {one["method"]: _error(each["measure"], one["value"]) for one in each["methods"]}
        recommended = _error(each["measure"], each["without its fold"]["value"])
        others = {
            "the average": of["mean"],
            "the best baseline (oracle)": min(of[name] for name in BASELINES if name in of),
            "the best in hindsight (oracle)": min(of.values()),
        }
        for name, error in others.items():
            ratios.setdefault(name, []).append(recommended / error)
    shown = ", ".join(f"to that of {name} {statistics.fmean(found):.3f}" for name, found in ratios.items())
    measured = "The error (squared, or 1 − AUC) of the recommendation without its fold"
    return f"{measured}, as a mean ratio over {len(next(iter(ratios.values())))} tables: {shown}."


def _error(measure: str, value: float) -> float:
    return 1 - value if measure == "auc" else value


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def _value(kept: Mapping[str, Any], method: str) -> str:
    """A method's mean over the environments, with its interval."""
    of = next(each for each in kept["methods"] if each["method"] == method)
    shown = _number(of["value"])
    return shown if of["interval"] is None else f"{shown} ({' to '.join(map(_number, of['interval']))})"


def _best(kept: Mapping[str, Any], methods: Sequence[str]) -> str:
    """The best of these methods: the verdict has the best first."""
    best = next(each["method"] for each in kept["methods"] if each["method"] in methods)
    return f"{method_name(best)} {_value(kept, best)}"


def _against(kept: Mapping[str, Any]) -> str:
    """The best baseline minus the average."""
    best = next(each["method"] for each in kept["methods"] if each["method"] in BASELINES)
    difference = next(each for each in kept["differences"] if each["method"] == best)
    low, high = difference["interval"]
    return f"{_number(difference['value'])} ({_number(low)} to {_number(high)}), {difference['verdict']}"


def _expected(kept: Mapping[str, Any]) -> str:
    following = kept["next_environment"]
    return "–" if following is None else " to ".join(map(_number, following["interval"]))


def _without(kept: Mapping[str, Any]) -> str:
    found = kept["without its fold"]
    return f"{_number(found['value'])} ({', '.join(dict.fromkeys(map(method_name, found['methods'])))})"


_COLUMNS: Mapping[str, Any] = {
    "table": lambda kept: kept["name"],
    "environments": lambda kept: f"{kept['count']}, {kept['folds']} folds",
    "seeds": lambda kept: kept["seeds"],
    "measure": lambda kept: kept["measure"].replace("_", " "),
    "average (95 %)": lambda kept: _value(kept, "mean"),
    "best baseline (95 %) (oracle)": lambda kept: _best(kept, BASELINES),
    "minus the average (95 %)": _against,
    "recommended (oracle)": lambda kept: _best(kept, [kept["recommended"]]),
    "recommended without its fold": _without,
    "best in hindsight (oracle)": lambda kept: _best(kept, [each["method"] for each in kept["methods"]]),
    "a new environment (95 %)": _expected,
}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
