"""The command that measures: bench."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from concord.cli.output import say, table
from concord.cli.parsing import parse


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """The benchmark table: ratios, measured interleaved on this machine."""

    only: str = ""
    """Only benchmarks whose file name contains this."""


def bench(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """The benchmark table."""
    from concord.benchmark import run_benchmarks
    from concord.machine import machine

    options = parse(_Bench, words, "concord bench")
    rows = run_benchmarks(options.only, say)
    if not as_json:
        print(machine())
        shown = [
            [
                row.name,
                _ms(row.seconds) + _gib(row.memory),
                row.reference,
                _ms(row.reference_seconds) + _gib(row.reference_memory),
                f"{row.ratio:.3f}",
                row.target,
            ]
            for row in rows
        ]
        table(["what", "time", "against", "time", "ratio", "target"], shown)
    fields = ("name", "seconds", "reference", "reference_seconds", "ratio", "memory", "reference_memory")
    return {"machine": machine(), "rows": [{field: getattr(row, field) for field in fields} for row in rows]}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _gib(memory: float | None) -> str:
    return "" if memory is None else f", {memory:.2f} GiB"
