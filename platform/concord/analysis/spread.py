"""A mean over seeds as tables show it."""

import statistics
from collections.abc import Sequence


def with_spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation, ``70.4 ± 0.9``; one value has none."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
