"""What ``concord analyze`` has found of several runs, as lines that are kept and as a table that is made of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from concord.comparisons.results import KeptLine, Table
from concord.runs.consistency_report import values_of
from concord.storage import json_line
from concord.training.comparison import Comparison

ANALYZED = "analyzed"  # in place of a table's name


def analyses_file(results: Path, job: str) -> Path:
    """Where the lines of a job's analyses are kept."""
    return results / f"{job}-{ANALYZED}.jsonl"


def write_analyses(analyses: Sequence[Mapping[str, Any]], command: str, results: Path) -> Path:
    """Keep what was found, a JSON line a run; returns the file.

    Args:
        analyses: the runs' JSON, all of one job.
        command: that asked for them.
        results: the folder.
    """
    lines = [
        KeptLine(
            each["method"],
            each["seed"],
            values_of(each),
            each["seconds"],
            {"command": command, **each["origin"]},
        )
        for each in analyses
    ]
    path = analyses_file(results, analyses[0]["job"])
    results.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(json_line(line.as_json()) for line in lines))
    return path


def analyses_table(lines: Sequence[KeptLine]) -> Table:
    """A row a method, mean and spread over its runs; of I^ε the largest ε alone, over its null."""
    headings = list(dict.fromkeys(heading for line in lines for heading in line.values))
    at_epsilon = [heading for heading in headings if "ε" in heading]
    largest = at_epsilon[-1].split(", ")[1] if at_epsilon else ""
    headings = [
        heading
        for heading in headings
        if heading not in at_epsilon or (heading.split(", ")[1] == largest and not heading.endswith(", null"))
    ]
    methods: dict[str, Mapping[str, Any]] = {line.configuration: {} for line in lines}
    comparison = Comparison(methods, columns={heading: heading for heading in headings})
    return Table("method", comparison, lines)
