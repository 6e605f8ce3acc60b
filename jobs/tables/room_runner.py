"""Room runner as found by the thesis' search (table A.1). The text prints no accuracies."""

from concord.analysis.skip_figures import accuracy_figure
from concord.training import Comparison

PLAIN = {"architecture": "plain", "exploration_steps": 0}
METHODS = {
    "ASI": {},
    "ASI, no exploration": {"horizon": 18, **PLAIN},
    **{f"Δt = {stride}": {"skip": "fixed", "stride": stride, **PLAIN} for stride in (1, 2, 3)},
}
# Half the size and half the kernels, and about as many evaluations of the model (40,000) for every method: of 200
# trajectories of 63 frames a pass takes 12,400 of them at a stride of 1, and a tenth of that with skips.
SMALL = {"size": 32, "trajectories": 200, "kernels": 24, "lr": 1e-3, "lr_decay_steps": 0, "evaluations": 5}
STRIDED = {**SMALL, "architecture": "strided"}
EQUAL = {
    "ASI": {**STRIDED, "epochs": 30, "exploration_steps": 600},
    "ASI, no exploration": {**STRIDED, "epochs": 30, "exploration_steps": 0},
    **{
        f"Δt = {stride}": {**STRIDED, "epochs": epochs, "skip": "fixed", "stride": stride, "exploration_steps": 0}
        for stride, epochs in ((1, 3), (2, 6), (3, 9))
    },
}
COLUMNS = {
    "soft accuracy": "ood_soft_accuracy",
    "hard accuracy": "ood_hard_accuracy",
    "mean skip": "ood_mean_skip",
    "model evaluations": "model_evaluations",
}
comparisons = {
    "equal-evaluations": Comparison(
        EQUAL,
        seeds=3,
        first_seed=1,
        columns={**COLUMNS, "frames seen": "ood_frames_seen"},
        figures={"accuracy": accuracy_figure},
        title="32 × 32 and 200 trajectories: 40,000 evaluations of the model for each method",
    ),
    # Which the thesis says does not matter much near 20; it has no figure of it.
    "horizons": Comparison(
        {f"H = {horizon}": {"horizon": horizon} for horizon in (5, 10, 15, 21, 30)},
        seeds=3,
        first_seed=1,
        columns=COLUMNS,
        figures={"horizons": accuracy_figure},
        title="ASI by its horizon",
    ),
    "table-a.1": Comparison(
        METHODS,
        seeds=8,
        first_seed=1,
        columns=COLUMNS,
        figures={"accuracy": accuracy_figure},
        title="settings of table A.1, 8 seeds",
    ),
}
