"""The fixed points of the AND-mask authors' notebook: four rows of data, all of them and halves of them."""

import math

from concord.training import Comparison, Run
from concord.training.comparison import Column

ROWS = {"all rows": (0, 1, 2, 3), "first two": (0, 1), "last two": (2, 3)}
RULES = ("mean", "and-mask", "geometric-mean")


def left_out_loss(run: Run) -> float:
    """The loss on the rows outside the training set; NaN if there are none."""
    return run.metrics.get("ood_loss", math.nan)


columns: dict[str, Column] = {f"weight {place}": f"weight_{place}" for place in range(5)}
columns |= {"training loss": "train_loss", "left-out loss": left_out_loss}


def fixed_point(rule: str, rows: tuple[int, ...]) -> dict[str, str | float]:
    """The fixed point of a rule, with decay .01; 1000 steps leave a rest of the start, which is not included.

    With the mean over k rows the residual r of each row satisfies 3r / k + .01 θ_row = 0 and .3 r + .01 θ_shared = 0.
    """
    weights, training, left_out = [0.0, 0.0, 0.0, 0.0, 3.0], 0.005, 0.005
    if rule == "mean":
        residual = -1 / (10 + 900 / len(rows))
        own, shared = -300 * residual / len(rows), -30 * residual
        weights = [*(own if row in rows else 0.0 for row in range(4)), shared]
        training, left_out = 0.5 * residual**2, 0.5 * (0.3 * shared - 1) ** 2
    return dict(zip(columns, [*weights, training, left_out if len(rows) < 4 else ""], strict=True))


comparisons = {
    "rows": Comparison(
        {
            f"{rule}, {name}": {"aggregator": rule, "rows": rows, "evaluations": 1, "checkpoints": 1}
            for rule in RULES
            for name, rows in ROWS.items()
        },
        seeds=2,
        columns=columns,
        paper={f"{rule}, {name}": fixed_point(rule, rows) for rule in RULES for name, rows in ROWS.items()},
        source="fixed point",
        digits=5,
        title="weights and losses of the authors' notebook, which is not in the paper; beside them its fixed points",
    )
}
