"""Table 6 of the meta-IRM paper; docs/objectives.md describes the choice of the settings."""

from typing import Any

from concord.training import Comparison

SHARED: dict[str, Any] = {"epochs": 60, "batch_size": 1000, "evaluations": 12}
ERM: dict[str, Any] = {"objective": "erm", "aggregator": "mean", "epochs": 40, "batch_size": 500, "evaluations": 12}
METHODS: dict[str, dict[str, Any]] = {
    "erm": ERM,
    "irm": {**SHARED, "objective": "irm", "penalty_weight": 1e4, "penalty_warmup": 0.15, "lr": 1e-2},
    "meta-irm": {
        **SHARED,
        "objective": "meta-irm",
        "inner_lr": 1.5,
        "penalty_weight": 3.0,
        "penalty_warmup": 0.0,
        "lr": 5e-3,
        "stop_spread": 0.001,
        "stop_from": 0.5,
    },
    "erm, no marks": {**ERM, "punctuate": False},
}
# Test accuracies at p_e = .9, by η.
PAPER = {
    "erm": {0.25: "30.7 ± 1.5", 0.0: "56.2 ± 2.9"},
    "irm": {0.25: "62.0 ± 1.9", 0.0: "67.4 ± 1.4"},
    "meta-irm": {0.25: "62.2 ± 1.8", 0.0: "73.0 ± 0.7"},
    "erm, no marks": {0.25: "62.3 ± 0.5", 0.0: "76.7 ± 2.7"},
}

comparisons = {
    "table-6": Comparison(
        {
            f"{method}, η = {noise:g}": {**settings, "noise": noise}
            for method, settings in METHODS.items()
            for noise in PAPER[method]
        },
        seeds=10,
        first_seed=2,  # seed 0 chose the settings
        columns={"train": "train_accuracy", "held out": "held_out_accuracy", "p_e = .9": "ood_accuracy"},
        paper={
            f"{method}, η = {noise:g}": {"p_e = .9": text} for method, by in PAPER.items() for noise, text in by.items()
        },
        percent=True,
        digits=1,
        title="Table 6; the paper's words have GloVe's vectors (--glove)",
    )
}
