"""The tutorial's table and histograms of Example 1 of the IRM paper."""

from typing import TYPE_CHECKING

from concord.training import Comparison, Runs
from concord_jobs.irm_regression.data import linear_example
from concord_jobs.irm_regression.figures import histograms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAIN, TEST = (0.1, 1.0), (0.01, 0.1, 1.0)
columns = {f"weight {place}": f"weight_{place}" for place in range(4)}
columns |= {f"train {sigma:g}": f"seen-{sigma:g}_loss" for sigma in TRAIN}
columns |= {f"test {sigma:g}": f"test-{sigma:g}_loss" for sigma in TEST}
tutorial = {
    "irm": [1.0060, 1.0005, 0.0139, 0.0153, 0.0201, 1.9500, 0.0006, 0.0198, 1.9405],
    "erm": [0.6488, 0.6907, 0.3352, 0.3396, 0.2335, 1.1130, 0.2302, 0.2371, 1.1020],
    "best possible": [1.0, 1.0, 0.0, 0.0, *(2 * sigma**2 for sigma in (*TRAIN, *TEST))],
}


def data(runs: Runs) -> "Figure":
    """The tutorial's histograms, of the first seed's data."""
    environments = linear_example(TRAIN, TEST)
    names = [*environments.train, *(f"test-{sigma:g}" for sigma in TEST)]
    return histograms({name: (environments[name].inputs, environments[name].targets) for name in names})


comparisons = {
    "example-1": Comparison(
        {
            "irm": {"evaluations": 1, "checkpoints": 1},
            "erm": {"objective": "erm", "aggregator": "mean", "evaluations": 1, "checkpoints": 1},
        },
        seeds=5,
        columns=columns,
        paper={row: dict(zip(columns, values, strict=True)) for row, values in tutorial.items()},
        digits=4,
        figures={"data": data},
        title="weights, and errors in the training environments and the tests",
    )
}
