"""Fig. 8 and 16 of the AND-mask paper, at the paper's size and for a laptop."""

from typing import Any

from concord.training import Comparison
from concord_jobs.memorization.figures import memorization_figure, thresholds_figure

THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
columns = {"training": "train_accuracy", "test": "ood_accuracy"}
MNIST = {"dataset": "mnist", "model": "mlp", "train_images": 6000, "lr": 1e-3}
CIFAR = {"train_images": 10_000, "epochs": 20, "evaluations": 10, "precision": "bfloat16"}
SMALL_CIFAR = {"train_images": 1000, "test_images": 1000, "epochs": 20, "evaluations": 10, "precision": "bfloat16"}


def by_threshold(thresholds: tuple[float, ...], shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A row for each kind of labels and threshold; threshold 0 averages."""
    return {
        f"{labels} labels, τ {threshold:g}": {**shared, "labels": labels, "threshold": threshold}
        for labels in ("random", "true")
        for threshold in thresholds
    }


def table(
    title: str, rows: dict[str, dict[str, Any]], seeds: int, suffix: str = "", thresholds: bool = True
) -> Comparison:
    """The accuracies, Fig. 8, and, with several thresholds, Fig. 16."""
    figures = {f"memorization{suffix}": memorization_figure}
    if thresholds:
        figures[f"thresholds{suffix}"] = thresholds_figure
    return Comparison(rows, seeds=seeds, columns=columns, figures=figures, title=title)


BATCH_NORM = {"train_images": 2000, "epochs": 60, "batch_norm": True}
DEFINITIONS = {
    f"by {definition}, {row}": {**options, **BATCH_NORM, "example_gradient": definition}
    for row, options in by_threshold((0.0, 0.2), MNIST).items()
    for definition in ("contribution", "loss")
}
ON_MNIST = by_threshold((*THRESHOLDS[:3], 0.15, *THRESHOLDS[3:]), MNIST)
ON_CIFAR = by_threshold((0.0, 0.2, 0.4), CIFAR)
ON_SMALL_CIFAR = by_threshold((0.0, 0.2), SMALL_CIFAR)
comparisons = {
    "mnist": table("Fig. 8 and 16 on 6,000 images of MNIST", ON_MNIST, 2, "-mnist"),
    "cifar10": table("Fig. 8 and 16 on 10,000 images of CIFAR-10, 20 epochs", ON_CIFAR, 1, "-cifar10-10000"),
    "cifar10-small": table("Fig. 8 on 1,000 images of CIFAR-10", ON_SMALL_CIFAR, 1, "-cifar10", thresholds=False),
    "definitions": table(
        "what an example's gradient is under batch norm", DEFINITIONS, 1, "-definitions", thresholds=False
    ),
    "fig-8": table("Fig. 8 and 16, the paper's protocol: for a GPU", by_threshold(THRESHOLDS, {}), 2),
}
