"""The command ``bench``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from concord.cli.output import table
from concord.cli.parsing import parse
from concord.errors import InputError, UnfinishedError
from concord.logs import info

if TYPE_CHECKING:
    from concord.benchmark import Row


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Run the benchmarks: times on this machine, interleaved with those of a reference, and their ratios.

    Every row is printed to standard error as soon as it is measured, with --json as a JSON line; after Ctrl-C the table
    has the rows so far.
    """

    only: str = ""
    """Only benchmarks whose file name contains this text, slow ones included."""
    all: bool = False
    """Also run the slow benchmarks, minutes each."""


def bench(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """The benchmark table."""
    options = parse(Bench, words, "concord bench")
    from concord.benchmark import benchmark_files, rows_of
    from concord.machine import machine

    files = benchmark_files(options.only, options.all)
    rows: list[Row] = []
    problems = []
    try:
        for file in files:
            info(f"measuring {file.stem}")
            try:
                for row in rows_of(file):
                    rows.append(row)
                    info(json.dumps(_as_json(row)) if as_json else "  " + "  ".join(_cells(row)))
            except InputError as error:  # a package that it needs is not installed
                if len(files) == 1 and not rows:
                    raise
                info(f"left out: {error}")
            except Exception as error:  # for example a missing device; the others continue
                problems.append(f"{file.stem} could not be measured ({type(error).__name__}: {error})".split("\n")[0])
                info(problems[-1])
    except KeyboardInterrupt:
        problems.append("stopped")
    if not as_json:
        print(machine())
        table(["what", "time", "against", "time", "ratio", "target"], [_cells(row) for row in rows])
    result = {"machine": machine(), "rows": [_as_json(row) for row in rows]}
    if problems:
        raise UnfinishedError("; ".join(problems), result)
    return result


def _as_json(row: "Row") -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if name != "target"}


def _cells(row: "Row") -> list[str]:
    return [
        row.name,
        _ms(row.seconds) + _gib(row.memory),
        row.reference,
        _ms(row.reference_seconds) + _gib(row.reference_memory),
        f"{row.ratio:.3f}",
        row.target,
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _gib(memory: float | None) -> str:
    return "" if memory is None else f", {memory:.2f} GiB"
