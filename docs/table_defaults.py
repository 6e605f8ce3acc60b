"""Measures a run of ``concord train table`` without options against ridge or logistic regression and boosting.

Each of six public tables (Rdatasets) is cut into five folds of environments. A run trains on four of them, without
options but data, environment, target and test, and is compared in the fifth with the better of both baselines: those
with the same rows held out, and those with none. ``python docs/table_defaults.py FOLDER RESULTS [TABLE …]`` reads
``FOLDER/Hsb82.csv.gz`` and so on, and adds the lines that are missing to the file of results.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from sklearn.model_selection import GroupKFold

import concord
from concord.execution.spec import run_origin
from concord.studies.results import ResultLine

FOLDS, SEEDS = 5, range(3)
BASELINES = ("ridge", "boosting")


class Data(NamedTuple):
    """A table: its columns, those that name rows or tell the target, and further options."""

    environment: str
    target: str
    ignored: tuple[str, ...]
    options: Mapping[str, str] = {}


TABLES = {
    "Hsb82": Data("school", "mAch", ("cses",)),
    "Exam": Data("school", "normexam", ("student",)),
    "Contraception": Data("district", "use", ("woman",)),
    "Chem97": Data("lea", "score", ("school", "student", "gcsecnt"), {"task": "regression"}),  # six whole numbers
    "guPrenat": Data("cluster", "prenat", ("kid", "mom")),
    "star": Data("sch", "math", ("id", "tch", "read")),
}


def folds(rows: pd.DataFrame, data: Data) -> Iterator[tuple[str, ...]]:
    """The environments of each fold."""
    names = rows[rows[data.target].notna()][data.environment].astype(str)
    for _, test in GroupKFold(FOLDS).split(names, groups=names):
        yield tuple(sorted(names.iloc[test].unique()))


def error(file: Path, data: Data, test: Sequence[str], output: str, **options: Any) -> float:
    """The squared error in the test's environments, or 1 - AUC."""
    run = concord.train(
        "table",
        data=file,
        environment=data.environment,
        target=data.target,
        test=tuple(test),
        columns=tuple(f"{name}=ignore" for name in data.ignored),
        register=False,
        output=output,
        **data.options,
        **options,
    )
    return run.metrics["ood_mse"] if "ood_mse" in run.metrics else 1 - run.metrics["ood_auc"]


def measured(file: Path, data: Data, output: str, seed: int) -> Mapping[str, float]:
    """The errors of a seed, averaged over the folds, and their ratios to the better baseline of each fold."""
    found = []
    for test in folds(pd.read_csv(file), data):
        trained = error(file, data, test, output, seed=seed)
        alike = {name: error(file, data, test, output, seed=seed, network=name) for name in BASELINES}
        whole = [error(file, data, test, output, seed=seed, network=name, held_out=0.0) for name in BASELINES]
        ratios = {"ratio": trained / min(alike.values()), "ratio, baselines on all rows": trained / min(whole)}
        found.append({"without options": trained, **alike, **ratios})
    return {name: fmean(each[name] for each in found) for name in found[0]}


def main(words: Sequence[str]) -> int:
    """Add the lines that are missing to a file of results."""
    folder, results, *chosen = words
    for seed in SEEDS:
        for name in chosen or TABLES:
            if any(line.configuration == name and line.seed == seed for line in ResultLine.read_all(Path(results))):
                continue
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as output:
                values = measured(Path(folder) / f"{name}.csv.gz", TABLES[name], output, seed)
            command = "python docs/table_defaults.py FOLDER docs/results/table-defaults.jsonl"
            origin = {"command": command, **run_origin(__file__)}
            line = ResultLine(name, seed, values, time.perf_counter() - started, origin)
            with Path(results).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line.as_json()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
