"""Rules and objectives on a table from three sites; what each row changes is all that differs."""

from typing import Any

from concord.training import Comparison

AVERAGE = {"aggregator": "mean"}
METHODS: dict[str, dict[str, Any]] = {
    "and-mask": {},
    "momentum by environment": {"environment_momentum": 0.9},
    "4 steps an update": {"threshold": 1.0, "steps_per_update": 4},
    "geometric-mean": {"aggregator": "geometric-mean"},
    "sand-mask": {"aggregator": "sand-mask"},
    "t-mask": {"aggregator": "t-mask", "environment_momentum": 0.9},
    "vrex": {"objective": "vrex", "penalty_weight": 100.0, "penalty_warmup": 0.2, **AVERAGE},
    "irm": {"objective": "irm", "penalty_weight": 100.0, "penalty_warmup": 0.2, **AVERAGE},
    "mean": AVERAGE,
}

comparisons = {
    "rules": Comparison(
        {method: {**options, "evaluations": 1} for method, options in METHODS.items()},
        seeds=5,
        first_seed=101,
        columns={"o.o.d.": "ood_accuracy", "validation": "validation_accuracy", "held out": "held_out_accuracy"},
        title="three sites and one column that misleads",
    )
}
