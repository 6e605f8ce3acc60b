"""The kept results of a table, read from the folder of results in the repository."""

import functools
from collections.abc import Sequence
from pathlib import Path

from concord.errors import InputError
from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS, comparisons_of
from concord.studies.leave_one_out import left_out_table
from concord.studies.results import ANALYZED, ResultLine, comparison_table, results_file, table_of_lines
from concord.table import Column, Table
from concord.training import load_job

DEFAULTS = "defaults"
"""The table that ``docs/table_defaults.py`` measures."""

job_of = functools.cache(load_job)


def read_lines(job: str, name: str, results: Path) -> list[ResultLine]:
    """The kept lines of a table, in the order of its file; none if the file does not exist."""
    return ResultLine.read_all(results / results_file(job_of(job).name, name))


def read_table(job: str, name: str, results: Path) -> Table:
    """A table over its kept lines."""
    file, lines = job_of(job), read_lines(job, name, results)
    if name == ANALYZED:
        return analyses_table(lines)
    if name.startswith(LEAVE_ONE_OUT):  # followed by which environments, if the data have several kinds
        return left_out_table(name, lines)
    if name in (METHODS, DEFAULTS):
        return table_of_lines(name, lines)
    tables = comparisons_of(file)
    if name not in tables:
        raise InputError(f"results of {job} {name}: no such table")
    if stray := {line.configuration for line in lines} - set(tables[name].configurations):
        raise InputError(f"{results / results_file(file.name, name)}: {sorted(stray)[0]} is not a row of {job} {name}")
    return comparison_table(name, tables[name], lines)


def analyses_table(lines: Sequence[ResultLine]) -> Table:
    """A row for each method, with mean and spread over its runs; for I^ε the largest ε, over its null."""
    headings = list(dict.fromkeys(heading for line in lines for heading in line.values))
    at_epsilon = [heading for heading in headings if "ε" in heading]
    largest = at_epsilon[-1].split(", ")[1] if at_epsilon else ""
    chosen = [
        heading
        for heading in headings
        if heading not in at_epsilon or (heading.split(", ")[1] == largest and not heading.endswith(", null"))
    ]
    return table_of_lines("method", lines, [Column(heading) for heading in chosen])
