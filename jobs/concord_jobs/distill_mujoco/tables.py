"""Table C.7 of the thesis, whole, in a tenth of the epochs, and on Hopper in three tenths, the ablations of figure 4.9,
all settings of Tables C.2 and C.3, the neighbours of Table C.5's settings, and the model-based baselines of C.2.2.3:
squared errors of predicted returns.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

from concord.space import Choice
from concord.training import Comparison, Run
from concord.training.comparison import at_best
from concord_jobs.distill_mujoco.job import STUDIES

PUBLISHED = {  # Table C.7: without a teacher, predicting x*, with a teacher that learns
    "HalfCheetah": (0.0485, 0.0477, 0.0427),
    "Hopper": (0.00270, 0.00224, 0.00132),
    "Swimmer": (0.0169, 0.0146, 0.00964),
    "Walker2d": (0.0238, 0.0211, 0.0164),
}
SETTINGS: dict[str, dict[str, Any]] = {  # Table C.5; all other settings are equal
    "Swimmer": {"meta_beta1": 0.9},
    "Walker2d": {"meta_beta1": 0.9, "teaching_weight": 1000.0, "validation_fraction": 0.5},
    "Hopper": {},
    "HalfCheetah": {"validation_fraction": 0.7},
}
METHODS: dict[str, dict[str, Any]] = {
    "no teacher": {"teacher": "none"},
    "predicting x*": {"teacher": "none", "auxiliary_weight": 4.0},  # of 1, 2 and 4, by Hopper's validation with seed 0
    "LDT": {"teacher": "meta"},
}
ABLATIONS: dict[str, tuple[dict[str, Any], str]] = {  # of LDT, and the thesis' result for each
    "no teacher": ({"teacher": "none"}, ""),
    "LDT": ({}, ""),
    "FT: an untrained teacher": ({"teacher": "fixed"}, "fails to learn"),
    "PT: time permuted": ({"permute_time": True}, "slightly worse than LDT"),
    "RT-16: all frames noise": ({"noise_frames": 16}, "slightly worse than no teacher"),
    # A batch of 24 does not divide 4000 examples, and 24 steps do not divide the 160 steps of a pass.
    "AR: split drawn anew": (
        {"resample_split": True, "batch_size": 25, "student_steps": 32},
        "slightly worse than no teacher",
    ),
    "RT-8: the last 8 frames noise": ({"noise_frames": 8}, ""),
}
WITHOUT_THE_GATE = ("no teacher", "RT-8: the last 8 frames noise")  # the first has no gate, the last no result to meet


NEIGHBOURS: dict[str, dict[str, Any]] = {  # of the settings found for Hopper: other values of Table C.4
    "as published": {},
    "β₁ 0.9": {"meta_beta1": 0.9},
    "inner rate 0.001": {"unrolled_lr": 1e-3},
    "inner rate 0.005": {"unrolled_lr": 5e-3},
    "α 100": {"teaching_weight": 100.0},
    "α 1000": {"teaching_weight": 1000.0},
    "judges 0.5": {"validation_fraction": 0.5},
    "judges 0.7": {"validation_fraction": 0.7},
}


# Chosen among all of Tables C.2 and C.3 by validation with seed 0.
SEARCHED: dict[str, dict[str, Any]] = {
    "no teacher, searched": {"batch_size": 16, "lr": 1e-2},
    "predicting x*, searched": {"auxiliary_weight": 4.0, "lr": 1e-2},
}


def gap(run: Run) -> float:
    """The error in the test minus that in training, at the end (figure 4.8)."""
    return run.metrics["ood_squared_error"] - run.metrics["train_squared_error"]


COLUMNS: dict[str, Any] = {
    "min. over training (oracle)": at_best("ood_squared_error", "ood_squared_error", "min"),  # as published
    "selected": at_best("ood_squared_error", "validation_squared_error", "min"),
    "at the end": "ood_squared_error",
}
ENDS: dict[str, Any] = {"training": "train_squared_error", "gap": gap}
MODEL_BASED: dict[str, dict[str, Any]] = {  # C.2.2.3, which prints no number
    "model of trajectories": {"teacher": "none", "dynamics": "trajectory"},
    "model of transitions": {"teacher": "none", "dynamics": "transition"},
}


def errors(
    title: str, rows: dict[str, dict[str, Any]], paper: Mapping[str, float | str], seeds: int = 2, ends: bool = True
) -> Comparison:
    """A table of squared errors and the published minima, with ``ends`` also of the errors in training."""
    columns = COLUMNS | (ENDS if ends else {})
    minima = {row: {"min. over training (oracle)": value} for row, value in paper.items()}
    # Seed 0 chose the constants of the gates.
    return Comparison(rows, seeds=seeds, first_seed=1, columns=columns, paper=minima, digits=5, title=title)


def table(simulators: list[str], seeds: int, title: str, **options: Any) -> Comparison:
    """The methods with each simulator, and the paper's minima."""
    rows = {
        f"{method}, {simulator}": {
            "simulator": simulator,
            **METHODS[method],
            **(SETTINGS[simulator] if method == "LDT" else {}),
            **options,
        }
        for simulator in simulators
        for method in METHODS
    }
    paper = {
        f"{method}, {simulator}": value
        for simulator in simulators
        for method, value in zip(METHODS, PUBLISHED[simulator], strict=True)
    }
    return errors(title, rows, paper, seeds)


def searched(study: str, name: str, option: str, title: str) -> Comparison:
    """All settings of a study without a teacher on Hopper: of this option, the learning rate and the weight decay."""
    columns = {
        "min. validation": at_best("validation_squared_error", "validation_squared_error", "min"),
        "selected": COLUMNS["selected"],
    }
    varied = {each: domain for each, domain in STUDIES[study].space.entries.items() if isinstance(domain, Choice)}
    fixed = {each: value for each, value in STUDIES[study].space.entries.items() if each not in varied}
    rows = {
        f"{name} {value:g}, rate {rate:g}, decay {decay:g}": {
            "simulator": "Hopper", **fixed, option: value, "lr": rate, "l2": decay,
        }
        for value, rate, decay in product(*(varied[each].values for each in (option, "lr", "l2")))
    }  # fmt: skip
    return Comparison(rows, seeds=1, columns=columns, digits=5, title=title)


comparisons = {
    "reduced": table(list(PUBLISHED), 2, "all simulators, 40 epochs, two seeds"),
    "hopper": table(["Hopper"], 8, "Hopper, 120 epochs, eight seeds", epochs=120, evaluations=60),
    "fig-4.9": errors(
        "ablations of figure 4.9 on Hopper, 15 epochs, two seeds",
        {
            row: {"simulator": "Hopper", "epochs": 15, "evaluations": 15, **options}
            for row, (options, _) in ABLATIONS.items()
        },
        {row: words for row, (_, words) in ABLATIONS.items() if words},
        ends=False,
    ),
    "fig-4.9-gate": errors(
        "ablations of figure 4.9 on Hopper with the gate as printed, 40 epochs, two seeds",
        {
            row: {"simulator": "Hopper", "gate_offset": 1.0, **options}
            for row, (options, _) in ABLATIONS.items()
            if row not in WITHOUT_THE_GATE
        },
        {row: words for row, (_, words) in ABLATIONS.items() if words and row not in WITHOUT_THE_GATE},
        ends=False,
    ),
    "C.5": errors(
        "the settings found for Hopper and their neighbours, 20 epochs, two seeds",
        {
            row: {"simulator": "Hopper", "epochs": 20, "evaluations": 20, **options}
            for row, options in NEIGHBOURS.items()
        },
        {},
        ends=False,
    ),
    "C.2": searched(
        "none",
        "batch",
        "batch_size",
        "all settings of Table C.2 on Hopper, 40 epochs, seed 0, which chooses by validation",
    ),
    "C.3": searched(
        "predicting",
        "weight",
        "auxiliary_weight",
        "all settings of Table C.3 on Hopper, 40 epochs, seed 0, which chooses by validation",
    ),
    "searched": errors(
        "the chosen settings of Tables C.2 and C.3 on Hopper, 120 epochs, eight seeds",
        {
            row: {"simulator": "Hopper", "teacher": "none", "epochs": 120, "evaluations": 60, **options}
            for row, options in SEARCHED.items()
        },
        {},
        seeds=8,
    ),
    "model-based": errors(
        "models of the dynamics in all simulators, 40 epochs, two seeds",
        {
            # Each example takes 16 evaluations of the network, so the test is seen ten times, not forty.
            f"{method}, {simulator}": {"simulator": simulator, "evaluations": 10, **options}
            for simulator in PUBLISHED
            for method, options in MODEL_BASED.items()
        },
        {},
    ),
    "C.7": table(list(PUBLISHED), 8, "all simulators, 400 epochs, eight seeds", epochs=400, evaluations=100),
}
