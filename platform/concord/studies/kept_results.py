"""The kept results of a table, read from the folder of results in the repository."""

import json
from pathlib import Path

from concord.errors import InputError
from concord.studies.comparison_plan import LEAVE_ONE_OUT, METHODS, comparisons_of
from concord.studies.left_out_table import left_out_table
from concord.studies.tables import ANALYZED, KeptLine, ResultsTable, analyses_table, results_file, table_of_lines
from concord.training import load_job


def read_table(job: str, name: str, results: Path) -> ResultsTable:
    """A table with its kept lines; without any if its file does not exist."""
    file = load_job(job)
    path = results / results_file(file.name, name)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [KeptLine.read(json.loads(line)) for line in text.splitlines()]
    if name == ANALYZED:
        return analyses_table(lines)
    if name == LEAVE_ONE_OUT:
        return left_out_table(name, lines)
    if name == METHODS:
        return table_of_lines(name, lines)
    tables = comparisons_of(file)
    if name not in tables:
        raise InputError(f"results of {job} {name}: no such table")
    if stray := {line.configuration for line in lines} - set(tables[name].configurations):
        raise InputError(f"{path}: {sorted(stray)[0]} is not a row of {job} {name}")
    return ResultsTable(name, tables[name], lines)
