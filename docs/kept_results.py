"""The kept results of a table, read from the folder of results in the repository."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.studies.comparison_plan import LEAVE_ONE_OUT, METHODS, comparisons_of
from concord.studies.left_out_table import left_out_table
from concord.studies.tables import ANALYZED, KeptLine, ResultsTable, results_file
from concord.training import Comparison, load_job

job_of = functools.cache(load_job)
ORIGIN = ("command", "commit", "machine", "data")  # of a run; the version of its data if known


def read_table(job: str, name: str, results: Path) -> ResultsTable:
    """A table with its kept lines; without any if its file does not exist."""
    file = job_of(job)
    path = results / results_file(file.name, name)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [_read(json.loads(line)) for line in text.splitlines()]
    if name == ANALYZED:
        return analyses_table(lines)
    if name.startswith(LEAVE_ONE_OUT):  # followed by which environments, if the data have several kinds
        return left_out_table(name, lines)
    if name == METHODS:
        return table_of_lines(name, lines)
    tables = comparisons_of(file)
    if name not in tables:
        raise InputError(f"results of {job} {name}: no such table")
    if stray := {line.configuration for line in lines} - set(tables[name].configurations):
        raise InputError(f"{path}: {sorted(stray)[0]} is not a row of {job} {name}")
    return ResultsTable(name, tables[name], lines)


def _read(line: Mapping[str, Any]) -> KeptLine:
    own = {name: line[name] for name in ("configuration", "seed", "values", "seconds")}
    return KeptLine(**own, origin={name: line[name] for name in ORIGIN if name in line})


def analyses_table(lines: Sequence[KeptLine]) -> ResultsTable:
    """A row for each method, with mean and spread over its runs; for I^ε the largest ε, over its null."""
    headings = list(dict.fromkeys(heading for line in lines for heading in line.values))
    at_epsilon = [heading for heading in headings if "ε" in heading]
    largest = at_epsilon[-1].split(", ")[1] if at_epsilon else ""
    shown = [
        heading
        for heading in headings
        if heading not in at_epsilon or (heading.split(", ")[1] == largest and not heading.endswith(", null"))
    ]
    return table_of_lines("method", lines, shown)


def table_of_lines(name: str, lines: Sequence[KeptLine], shown: Iterable[str] | None = None) -> ResultsTable:
    """The table whose rows and columns are those of the lines; ``shown`` are some of the headings."""
    headings = [heading for line in lines for heading in line.values] if shown is None else shown
    rows: dict[str, Mapping[str, Any]] = {line.configuration: {} for line in lines}
    columns = {heading: heading for heading in headings}
    return ResultsTable(name, Comparison(rows or {"none": {}}, columns=columns), lines)
