"""Writes the tables of documents from the files of results in the repository.

A document marks a table's place::

    <!-- results: JOB TABLE -->
    <!-- end of results -->

The lines between are made from ``docs/results/JOB-TABLE.jsonl``, written by ``concord report JOB TABLE --results …``.
The TABLE ``analyzed`` holds the results of ``concord analyze JOB --name RUN… --results …``.
``python -m concord.studies.documents docs/results README.md docs/*.md`` rewrites all of them.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from concord.errors import InputError
from concord.studies.comparison_plan import comparisons_of
from concord.studies.tables import ANALYZED, ORIGIN, KeptLine, Table, analyses_table, markdown, results_file
from concord.training import load_job

_PLACE = re.compile(r"<!-- results: (\S+) (\S+) -->\n.*?<!-- end of results -->", re.DOTALL)


def with_tables(text: str, results: Path) -> str:
    """The document with its tables rewritten from the files in this folder.

    Raises:
        InputError: a table or its file does not exist.
    """

    def table(place: re.Match[str]) -> str:
        job, name = place[1], place[2]
        return f"<!-- results: {job} {name} -->\n{documented(job, name, results)}<!-- end of results -->"

    return _PLACE.sub(table, text)


def documented(job: str, name: str, results: Path) -> str:
    """A table, with the command, commit and machine below it.

    Raises:
        InputError: the table or its file does not exist.
    """
    file = load_job(job)
    path = results / results_file(file.name, name)
    tables = {} if name == ANALYZED else comparisons_of(file)
    if name != ANALYZED and name not in tables:
        raise InputError(f"results of {job} {name}: no such table")
    if not path.is_file():
        raise InputError(f"results of {job} {name}: there is no {path}")
    lines = [KeptLine.read(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    table = analyses_table(lines) if name == ANALYZED else Table(name, tables[name], lines)
    if stray := {line.configuration for line in lines} - set(table.comparison.configurations):
        raise InputError(f"{path}: {sorted(stray)[0]} is not a row of {job} {name}")
    made_by = {part: list(dict.fromkeys(line.origin.get(part, "") for line in lines)) for part in ORIGIN}
    commits = " and ".join(dict.fromkeys(map(_short, made_by["commit"])))
    data = "".join(f"data {version}; " for version in made_by["data"] if version)
    commands, machines = "` and `".join(made_by["command"]), " and ".join(made_by["machine"])
    made = f"`{commands}` at commit {commits}; {data}{machines}; {path.name}"
    return f"\n{markdown(table.cells())}\n{made}\n"


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
