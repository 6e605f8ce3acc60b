"""Fig. 9 of the AND-mask paper, at the paper's size and for a laptop."""

from typing import Any

from concord.training import Column, Comparison
from concord.training.comparison import at_best
from concord_jobs.label_noise.job import RIGHT, WRONG
from concord_jobs.memorization.figures import label_noise_figure

columns: dict[str, Column] = {
    "wrong labels": f"{WRONG}_accuracy",
    "right labels": f"{RIGHT}_accuracy",
    "test at its peak (oracle)": at_best("ood_accuracy", "ood_accuracy", "max"),
    "test": "ood_accuracy",
}
MNIST = {"dataset": "mnist", "model": "mlp", "train_images": 6000}
CIFAR = {"train_images": 500, "test_images": 500, "epochs": 20, "evaluations": 10, "precision": "bfloat16"}


def by_rate(rates: tuple[float, ...], shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A row for the average and the AND-mask with each learning rate."""
    return {
        f"{method}, {rate:g}": {**shared, "threshold": threshold, "lr": rate}
        for method, threshold in (("average", 0.0), ("and-mask", 0.2))
        for rate in rates
    }


def table(title: str, figure: str, rows: dict[str, dict[str, Any]], seeds: int) -> Comparison:
    """The accuracies on each part, and Fig. 9."""
    return Comparison(rows, seeds=seeds, columns=columns, figures={figure: label_noise_figure}, title=title)


RATES = (5e-4, 1e-3, 5e-3)
comparisons = {
    "mnist": table("Fig. 9 on 6,000 images of MNIST", "label-noise-mnist", by_rate(RATES, MNIST), seeds=2),
    "cifar10-small": table("Fig. 9 on 500 images of CIFAR-10", "label-noise-cifar10", by_rate((1e-3,), CIFAR), seeds=1),
    "fig-9": table("Fig. 9, the paper's protocol: for a GPU", "label-noise", by_rate(RATES, {}), seeds=2),
}
