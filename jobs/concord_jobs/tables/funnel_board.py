"""Funnel board as found by the thesis' search (table A.2). The text prints no accuracies."""

from concord.analysis.skip_figures import accuracy_figure
from concord.runs.trajectory_job import TABLE_A2, methods_of
from concord.training import Comparison

METHODS = methods_of(TABLE_A2)
COLUMNS = {
    "soft accuracy": "ood_soft_accuracy",
    "hard accuracy": "ood_hard_accuracy",
    "mean skip": "ood_mean_skip",
    "model evaluations": "model_evaluations",
}
comparisons = {
    "table-a.2": Comparison(
        METHODS,
        seeds=8,
        first_seed=1,
        columns=COLUMNS,
        figures={"accuracy": accuracy_figure},
        title="settings of table A.2, 8 seeds",
    ),
    "fig-2.11": Comparison(
        {name: {**method, "switch_epoch": 75} for name, method in METHODS.items()},
        seeds=8,
        first_seed=1,
        columns=COLUMNS,
        figures={"accuracy": accuracy_figure},
        title="without bounces to epoch 75, then with them",
    ),
}
