"""Funnel board as found by the thesis' search (table A.2). The text prints no accuracies."""

from concord.training import Comparison
from concord_jobs.box2d.figures import accuracy_figure
from concord_jobs.box2d.trajectory_job import COLUMNS, methods_of
from concord_jobs.funnel_board.job import TABLE_A2

METHODS = methods_of(TABLE_A2)
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
