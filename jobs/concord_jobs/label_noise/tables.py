"""Fig. 9 of the AND-mask paper, at the paper's size and for a laptop."""

from typing import Any

from concord.training import Column, Comparison
from concord.training.comparison import at_best
from concord_jobs.label_noise.job import RIGHT, WRONG
from concord_jobs.memorization.figures import label_noise_figure

columns: dict[str, Column] = {
    "wrong labels": f"{WRONG}_accuracy",
    "right labels": f"{RIGHT}_accuracy",
    "test at its peak": at_best("ood_accuracy", "ood_accuracy", "max"),
    "test": "ood_accuracy",
}
CIFAR = {"train_images": 500, "test_images": 500, "epochs": 20, "evaluations": 10, "precision": "bfloat16"}


def by_rate(rates: tuple[float, ...], shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A row for the average and the AND-mask with each learning rate."""
    return {
        f"{method}, {rate:g}": {**shared, "threshold": threshold, "lr": rate}
        for method, threshold in (("average", 0.0), ("and-mask", 0.2))
        for rate in rates
    }


RATES = (5e-4, 1e-3, 5e-3)
comparisons = {
    "mnist": Comparison(
        by_rate(RATES, {"data": "mnist", "model": "mlp", "train_images": 6000}),
        seeds=2,
        columns=columns,
        figures={"label-noise-mnist": label_noise_figure},
        title="Fig. 9 on 6,000 images of MNIST",
    ),
    "cifar10-small": Comparison(
        by_rate((1e-3,), CIFAR),
        seeds=1,
        columns=columns,
        figures={"label-noise-cifar10": label_noise_figure},
        title="Fig. 9 on 500 images of CIFAR-10",
    ),
    "fig-9": Comparison(
        by_rate(RATES, {}),
        seeds=2,
        columns=columns,
        figures={"label-noise": label_noise_figure},
        title="Fig. 9, the paper's protocol: for a GPU",
    ),
}
