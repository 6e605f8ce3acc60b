"""Room runner as found by the thesis' search (table A.1). The text prints no accuracies."""

from concord.analysis.skip_figures import accuracy_figure
from concord.training import Comparison

PLAIN = {"architecture": "plain", "exploration_steps": 0}
METHODS = {
    "ASI": {},
    "ASI, no exploration": {"horizon": 18, **PLAIN},
    **{f"Δt = {stride}": {"skip": "fixed", "stride": stride, **PLAIN} for stride in (1, 2, 3)},
}
COLUMNS = {
    "soft accuracy": "ood_soft_accuracy",
    "hard accuracy": "ood_hard_accuracy",
    "mean skip": "ood_mean_skip",
    "model evaluations": "model_evaluations",
}
comparisons = {
    "table-a.1": Comparison(
        METHODS,
        seeds=8,
        first_seed=1,
        columns=COLUMNS,
        figures={"accuracy": accuracy_figure},
        title="settings of table A.1, 8 seeds",
    )
}
