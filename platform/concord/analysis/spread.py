"""Mean and spread of several runs, for tables and figures."""

import math
import statistics
from collections.abc import Iterable, Sequence


def with_spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation, ``70.4 ± 0.9``; one value has none."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def finite(values: Iterable[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]


def mean_and_std(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation over runs, None if there are too few."""
    return {
        "mean": statistics.fmean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
    }


def median_and_range(values: Sequence[float], of: str = "seeds") -> dict[str, float]:
    """Median and range over runs."""
    return {"median": statistics.median(values), "least": min(values), "largest": max(values), of: len(values)}
