"""Funnel board as found by the thesis' search (table A.2). The text prints no accuracies."""

from concord.analysis.skip_figures import accuracy_figure
from concord.training import Comparison

SMALL = {"lr": 7.5e-4, "kernels": 32, "exploration_steps": 0}
METHODS = {
    "ASI": {},
    "ASI, no exploration": {"horizon": 18, "lr_decay_steps": 10_000, "architecture": "strided", **SMALL},
    "Δt = 1": {"skip": "fixed", "stride": 1, **SMALL},
    "Δt = 2": {"skip": "fixed", "stride": 2, "architecture": "strided", **SMALL},
    "Δt = 3": {"skip": "fixed", "stride": 3, "architecture": "strided", **SMALL},
}
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
