"""Funnel board with the settings of the thesis' search (table A.2). The thesis prints no accuracies."""

from concord.training import Run
from concord_jobs.box2d.trajectory_job import COLUMNS, methods_of, table
from concord_jobs.funnel_board.job import TABLE_A2

METHODS = methods_of(TABLE_A2)
SWITCHED = {name: {**method, "switch_epoch": 75} for name, method in METHODS.items()}
# Half of the kernels, a ninth of the default's steps, all on the model's own matches, and in bfloat16: for two cores.
SHORT = {**METHODS["ASI, no exploration"], "kernels": 16, "epochs": 16, "evaluations": 2, "precision": "bfloat16"}


def share_seen(run: Run) -> float:
    """The share of the predictions in the test in which the ball can be seen."""
    return run.metrics["ood_frames_seen"] / run.metrics["ood_predictions"]


comparisons = {
    "short": table(
        {"ASI, no exploration": SHORT},
        "ASI without exploration, 16 of 32 kernels, 4,000 steps",
        seeds=1,
        columns={**COLUMNS, "predictions": "ood_predictions", "share seen": share_seen},
    ),
    "table-a.2": table(METHODS, "settings of table A.2, 8 seeds"),
    "fig-2.11": table(SWITCHED, "hardly a bounce to epoch 75, then the standard physics"),
}
