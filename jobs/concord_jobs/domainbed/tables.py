"""DomainBed's tables: its default hyperparameters, beside its own numbers."""

from collections.abc import Sequence
from typing import Any

from concord.training import Comparison

# Defaults of DomainBed; the penalties begin after 500 of its 5,001 steps.
METHODS: dict[str, dict[str, Any]] = {
    "ERM": {},
    "IRMv1": {"objective": "irm", "penalty_weight": 100.0, "penalty_warmup": 0.1},
    "V-REx": {"objective": "vrex", "penalty_weight": 10.0, "penalty_warmup": 0.1},
    "GroupDRO": {"objective": "group-dro", "group_rate": 0.01},
    "mixup": {"objective": "mixup", "mixup_alpha": 0.2},
    "CORAL": {"objective": "coral", "penalty_weight": 1.0},
    "SD": {"objective": "sd", "penalty_weight": 0.1},
}


def table(title: str, option: str, environments: Sequence[str], published: dict[str, str]) -> Comparison:
    """A row for each method and left-out environment; the published numbers are in the environments' order."""
    return Comparison(
        {
            f"{method}, {name}": {**options, option: name}
            for method, options in METHODS.items()
            for name in environments
        },
        seeds=3,
        columns={"left out": "ood_accuracy", "held out": "held_out_accuracy"},
        paper={
            f"{method}, {name}": {"left out": number}
            for method, numbers in published.items()
            for name, number in zip(environments, numbers.split(), strict=True)
        },
        source="DomainBed",
        percent=True,
        digits=1,
        title=f"{title}: default hyperparameters and a fifth of the steps; DomainBed: 5,001 steps, 20 trials, selected "
        "by the training domains",
    )
