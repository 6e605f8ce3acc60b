"""The methods on the same CoinRun data; only the settings of the paper's own search (its Table 3) were tuned."""

from typing import Any

from matplotlib.figure import Figure

from concord.analysis.best_runs_figures import best_runs_figure
from concord.training import Comparison, Runs
from concord.training.comparison import at_end

ADAM: dict[str, Any] = {"beta1": 0.9, "lr": 1e-3, "l2": 0.057, "optimizer": "adam", "evaluations": 1}
# Steps with the same number of states, from eight levels at once.
TOGETHER = {**ADAM, "environments_per_step": 8, "batch_size": 8}
# Table 3, in the paper's order of columns: lr, β₁, β₃, τ, weight decay, and the published test KL.
TABLE_3 = (
    (0.0078, 0.21, 0.79, 0.36, 0.057, 0.01652),
    (0.0072, 0.26, 0.86, 0.40, 0.041, 0.01656),
    (0.0080, 0.23, 0.84, 0.41, 0.045, 0.01662),
    (0.0068, 0.33, 0.72, 0.47, 0.077, 0.01665),
    (0.0063, 0.67, 0.65, 0.47, 0.080, 0.01672),
)
OPTIONS = ("lr", "beta1", "beta3", "temporal_threshold", "l2")


def clones_figure(runs: Runs) -> Figure:
    """The test KL at the end of every run, a column for each method."""
    return best_runs_figure({method: at_end(each, "ood_loss") for method, each in runs.items()}, "test KL")


comparisons = {
    "clones": Comparison(
        {
            "adam": ADAM,
            "temporal-and-mask": {"evaluations": 1},
            "adam, levels together": TOGETHER,
            "spatial-and-mask": {**TOGETHER, "aggregator": "and-mask"},
        },
        seeds=3,
        columns={
            "training KL": "train_loss",
            "test KL": "ood_loss",
            "agreement": "ood_agreement",
            "return": "ood_return",
        },
        digits=5,
        figures={"clones": clones_figure},
        title="clones by each method",
    ),
    "table-3": Comparison(
        {
            f"row {place}": {**dict(zip(OPTIONS, row, strict=False)), "play_episodes": 0}
            for place, row in enumerate(TABLE_3, 1)
        },
        seeds=1,
        columns={"test KL": "ood_loss"},
        paper={f"row {place}": {"test KL": row[-1]} for place, row in enumerate(TABLE_3, 1)},
        digits=5,
        title="Table 3: the paper's five best settings",
    ),
}
