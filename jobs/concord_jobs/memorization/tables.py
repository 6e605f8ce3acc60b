"""Fig. 8 and 16 of the AND-mask paper, at the paper's size and for a laptop."""

from typing import Any

from concord.training import Comparison
from concord_jobs.memorization.figures import memorization_figure, thresholds_figure

THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
columns = {"training": "train_accuracy", "test": "ood_accuracy"}
MNIST = {"data": "mnist", "model": "mlp", "train_images": 6000, "lr": 1e-3}
CIFAR = {"train_images": 10_000, "epochs": 20, "evaluations": 10, "precision": "bfloat16"}
SMALL_CIFAR = {"train_images": 1000, "test_images": 1000, "epochs": 20, "evaluations": 10, "precision": "bfloat16"}


def by_threshold(thresholds: tuple[float, ...], shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A row for each kind of labels and threshold; threshold 0 averages."""
    return {
        f"{labels} labels, τ {threshold:g}": {**shared, "labels": labels, "threshold": threshold}
        for labels in ("random", "true")
        for threshold in thresholds
    }


FIGURES = {"memorization": memorization_figure, "thresholds": thresholds_figure}
comparisons = {
    "mnist": Comparison(
        by_threshold((*THRESHOLDS[:3], 0.15, *THRESHOLDS[3:]), MNIST),
        seeds=2,
        columns=columns,
        figures={f"{name}-mnist": draw for name, draw in FIGURES.items()},
        title="Fig. 8 and 16 on 6,000 images of MNIST",
    ),
    "cifar10": Comparison(
        by_threshold((0.0, 0.2, 0.4), CIFAR),
        seeds=1,
        columns=columns,
        figures={f"{name}-cifar10-10000": draw for name, draw in FIGURES.items()},
        title="Fig. 8 and 16 on 10,000 images of CIFAR-10, 20 epochs",
    ),
    "cifar10-small": Comparison(
        by_threshold((0.0, 0.2), SMALL_CIFAR),
        seeds=1,
        columns=columns,
        figures={"memorization-cifar10": memorization_figure},
        title="Fig. 8 on 1,000 images of CIFAR-10",
    ),
    "definitions": Comparison(
        {
            f"by {definition}, {row}": {
                **options,
                "train_images": 2000,
                "epochs": 60,
                "batch_norm": True,
                "example_gradient": definition,
            }
            for row, options in by_threshold((0.0, 0.2), MNIST).items()
            for definition in ("contribution", "loss")
        },
        seeds=1,
        columns=columns,
        figures={"memorization-definitions": memorization_figure},
        title="what an example's gradient is under batch norm",
    ),
    "fig-8": Comparison(
        by_threshold(THRESHOLDS, {}),
        seeds=2,
        columns=columns,
        figures=FIGURES,
        title="Fig. 8 and 16, the paper's protocol: for a GPU",
    ),
}
