"""Table C.7 of the thesis, and Hopper's part of it: squared errors of predicted returns, alone and with LDT."""

from typing import Any

from concord.training import Comparison, FinishedRun

PUBLISHED = {  # Table C.7: without a teacher, with one that learns
    "HalfCheetah": (0.0485, 0.0427),
    "Hopper": (0.00270, 0.00132),
    "Swimmer": (0.0169, 0.00964),
    "Walker2d": (0.0238, 0.0164),
}
SETTINGS: dict[str, dict[str, Any]] = {  # Table C.5; all others are alike
    "Swimmer": {"meta_beta1": 0.9},
    "Walker2d": {"meta_beta1": 0.9, "teaching_weight": 1000.0, "validation_fraction": 0.5},
    "Hopper": {},
    "HalfCheetah": {"validation_fraction": 0.7},
}
METHODS = {"no teacher": "none", "LDT": "meta"}


def least(run: FinishedRun) -> float:
    """The minimum of the test's error over training, as published; it looks at the test (an oracle)."""
    return min(each.metrics["ood_squared_error"] for each in run.history)


def selected(run: FinishedRun) -> float:
    """The test's error where that of the validation examples is the smallest."""
    return min(run.history, key=lambda each: each.metrics["validation_squared_error"]).metrics["ood_squared_error"]


def table(simulators: list[str], seeds: int, title: str, **options: Any) -> Comparison:
    """The methods with each simulator, and the paper's minima."""
    names = [(simulator, method) for simulator in simulators for method in METHODS]
    return Comparison(
        {
            f"{method}, {simulator}": {
                "simulator": simulator,
                "teacher": METHODS[method],
                **(SETTINGS[simulator] if METHODS[method] == "meta" else {}),
                **options,
            }
            for simulator, method in names
        },
        seeds=seeds,
        first_seed=1,  # seed 0 chose the constants of the gates
        columns={"min. over training (oracle)": least, "selected": selected, "at the end": "ood_squared_error"},
        paper={
            f"{method}, {simulator}": {"min. over training (oracle)": value}
            for simulator in simulators
            for method, value in zip(METHODS, PUBLISHED[simulator], strict=True)
        },
        digits=5,
        title=title,
    )


comparisons = {
    "hopper": table(["Hopper"], 2, "Hopper in 40 epochs, two seeds"),
    "C.7": table(list(PUBLISHED), 8, "all simulators, 400 epochs, eight seeds", epochs=400, evaluations=100),
}
