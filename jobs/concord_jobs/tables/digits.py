"""Rules on digits in few domains, with a shortcut each; what each row changes is all that differs."""

from typing import Any

from concord.training import Comparison

METHODS: dict[str, dict[str, Any]] = {
    "and-mask": {},
    "all agree": {"threshold": 1.0},
    "momentum by environment": {"threshold": 1.0, "environment_momentum": 0.9},
    "4 steps an update": {"threshold": 1.0, "steps_per_update": 4},
    "geometric-mean": {"aggregator": "geometric-mean"},
    "sand-mask": {"aggregator": "sand-mask"},
    "t-mask": {"aggregator": "t-mask", "environment_momentum": 0.9},
    "vrex": {"objective": "vrex", "aggregator": "mean", "penalty_weight": 10.0},
    "mean": {"aggregator": "mean"},
}

comparisons = {
    "domains": Comparison(
        {
            f"{method}, {domains} domains": {**options, "domains": domains, "evaluations": 1}
            for domains in (3, 5, 10)
            for method, options in METHODS.items()
        },
        seeds=5,
        first_seed=101,
        columns={"o.o.d.": "ood_accuracy", "validation": "validation_accuracy", "held out": "held_out_accuracy"},
        title="few domains with a shortcut each",
    )
}
