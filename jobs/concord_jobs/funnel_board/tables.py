"""Funnel board with the settings of the thesis' search (table A.2). The thesis prints no accuracies."""

from concord_jobs.box2d.trajectory_job import methods_of, table
from concord_jobs.funnel_board.job import TABLE_A2

METHODS = methods_of(TABLE_A2)
SWITCHED = {name: {**method, "switch_epoch": 75} for name, method in METHODS.items()}
comparisons = {
    "table-a.2": table(METHODS, "settings of table A.2, 8 seeds"),
    "fig-2.11": table(SWITCHED, "hardly a bounce to epoch 75, then the standard physics"),
}
