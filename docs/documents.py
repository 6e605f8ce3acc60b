"""Writes the tables of documents from the files of results in the repository.

A document marks a table's place::

    <!-- results: JOB TABLE -->
    <!-- end of results -->

The lines between are made from ``docs/results/JOB-TABLE.jsonl``, written by ``concord report JOB TABLE --results …``.
Several jobs with commas between them, and the table ``methods``, give one table: a row a method, and of each job the
o.o.d. test.

The TABLE ``verdicts`` has a row for each comparison that ``docs/table_verdicts.py`` keeps, and ``analyzed`` the
results of ``concord analyze JOB --name RUN… --results …``. Between
``<!-- reproduction: PART -->`` and ``<!-- end of reproduction -->`` stand the papers' ``items``, a ``summary`` of them
or a ``sentence``, made from the same files and ``docs/results/papers.yaml``.
``make tables`` rewrites all of them.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from concord.analysis.method_names import method_name
from concord.errors import InputError
from concord.studies.methods import KNOWN
from concord.studies.recommendation import TEST
from concord.studies.results import results_file
from concord.table import Column, Table
from kept_results import job_of, read_lines, read_table
from reproduction import PARTS, read_papers
from table_verdicts import means_table, ratios_line, verdicts_table

_ORIGIN = ("command", "commit", "machine", "data")  # of a run; the version of its data if known
_PLACE = re.compile(r"<!-- results: (\S+) (\S+) -->\n.*?<!-- end of results -->", re.DOTALL)
_REPRODUCTION = re.compile(r"<!-- reproduction: (\S+) -->.*?<!-- end of reproduction -->", re.DOTALL)


def with_tables(text: str, results: Path) -> str:
    """The document with its tables rewritten from the files in this folder."""

    def table(place: re.Match[str]) -> str:
        job, name = place[1], place[2]
        if name == "verdicts":
            tables = f"{verdicts_table(results).markdown()}\n{means_table(results).markdown()}"
            shown = f"{tables}\n{ratios_line(results)}\n"
            return f"<!-- results: {job} {name} -->\n\n{shown}<!-- end of results -->"
        shown = side_by_side(job.split(","), name, results) if "," in job else documented(job, name, results)
        return f"<!-- results: {job} {name} -->\n{shown}<!-- end of results -->"

    def reproduction(place: re.Match[str]) -> str:
        if place[1] not in PARTS:
            raise InputError(f"reproduction: {place[1]}: must be one of {', '.join(PARTS)}")
        return f"<!-- reproduction: {place[1]} -->{PARTS[place[1]](read_papers(results))}<!-- end of reproduction -->"

    return _REPRODUCTION.sub(reproduction, _PLACE.sub(table, text))


def documented(job: str, name: str, results: Path) -> str:
    """A table of the rows that are kept, with the command, commit and machine below it."""
    table = _kept(job, name, results)
    empty = {row.name for row in table.rows if not row.runs}
    written = dataclasses.replace(
        table,
        rows=[row for row in table.rows if row.runs],
        published={row: cells for row, cells in table.published.items() if row not in empty},
        title="",
    )
    return f"\n{written.markdown()}\n{_origin(job, name, results)}\n"


def side_by_side(jobs: Sequence[str], name: str, results: Path) -> str:
    """The tables of methods of several jobs as one: a row a method, and a column a job, its test."""
    tables = {job: _kept(job, name, results) for job in jobs}
    methods = [row for row in KNOWN if any(row in _names(table) for table in tables.values())]
    columns = [Column("method", method_name), *(Column(job, partial(_test, table)) for job, table in tables.items())]
    origins = "".join(f"{_origin(job, name, results)}\n" for job in jobs)
    return f"\n{Table.of(columns, methods).markdown()}\n{origins}"


def _names(table: Table) -> set[str]:
    return {row.name for row in table.rows}


def _test(table: Table, method: str) -> list[float]:
    heading = next(each for column in table.columns if (each := column.title).startswith(TEST))
    return table.numbers(method, heading)


def _kept(job: str, name: str, results: Path) -> Table:
    table = read_table(job, name, results)
    if not table.runs:
        raise InputError(f"results of {job} {name}: there is no {results / results_file(job_of(job).name, name)}")
    return table


def _origin(job: str, name: str, results: Path) -> str:
    """Command, commits and machines of a table, in one line."""
    lines = read_lines(job, name, results)
    made_by = {part: list(dict.fromkeys(line.origin.get(part, "") for line in lines)) for part in _ORIGIN}
    commits = " and ".join(dict.fromkeys(map(_short, made_by["commit"])))
    data = "".join(f"data {version}; " for version in made_by["data"] if version)
    commands, machines = "` and `".join(made_by["command"]), " and ".join(made_by["machine"])
    return f"`{commands}` at commit {commits}; {data}{machines}; {results_file(job_of(job).name, name)}"


def _short(commit: str) -> str:
    """The short form of a commit, marked if files were changed since."""
    letters, dirty, _ = commit.partition("-dirty")
    return letters[:12] + dirty


def main(words: Sequence[str]) -> int:
    """Rewrite the tables of these documents."""
    results, *documents = map(Path, words)
    for path in documents:
        before = path.read_text(encoding="utf-8")
        after = with_tables(before, results)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path}: tables rewritten")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
