"""Label noise (AND-mask paper, §3.2): a quarter of the training labels is shuffled, every example is an environment.

The network that averages gradients first learns the images, then memorizes the wrong labels, and its test accuracy
falls after its peak; where examples have to agree it keeps to what holds for all. ``concord tune label-noise --search
grid`` is one seed of Fig. 9, ``concord report label-noise`` draws it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from concord.analysis.figures import save
from concord.analysis.memorization_figures import label_noise_figure
from concord.environments import Environments, shuffle_labels
from concord.environments.image_options import ImageOptions, source
from concord.errors import InputError
from concord.models.image_options import ImageNetworkOptions
from concord.space import Choice, Space
from concord.studies.report import comparable_trials, load_trials
from concord.training import Job, Report, Study, TrainConfig
from concord.training.options import DEFAULT_OUTPUT

WRONG, RIGHT = "wrong_labels", "right_labels"


@dataclass(frozen=True, kw_only=True)
class LabelNoiseConfig(TrainConfig):
    """Training with shuffled labels among the true ones (AND-mask paper, §3.2, Fig. 9)."""

    # fmt: off
    label_noise: float = 0.25
    """Fraction of the training labels that are shuffled among themselves."""
    images: ImageOptions = field(default_factory=ImageOptions)
    network: ImageNetworkOptions = field(default_factory=ImageNetworkOptions)
    # fmt: on


def model(config: LabelNoiseConfig) -> nn.Module:
    """The network for these images."""
    data = config.images.images(config.data.data_dir)
    channels, height, width = data.train.images.shape[1:]
    return config.network.network(channels, height, width, data.classes)


def environments(config: LabelNoiseConfig) -> Environments:
    """The training images, those with wrong and those with right labels by themselves, and the test images."""
    data = config.images.images(config.data.data_dir)
    labels, wrong = shuffle_labels(data.train.labels, config.label_noise, config.run.seed)
    parts = {"train": torch.ones_like(wrong), WRONG: wrong, RIGHT: ~wrong}
    parts = {name: part for name, part in parts.items() if bool(part.any())}

    def load(name: str) -> tuple[Any, Any]:
        if name == "test":
            return data.test.images, data.test.labels
        return data.train.images[parts[name]], labels[parts[name]]

    return Environments(load, ["train"], test=["test"], observed=[name for name in parts if name != "train"])


@dataclass(frozen=True, kw_only=True)
class LabelNoiseReport:
    """Figures of label noise: accuracy on wrongly labelled images and on the test, by epoch (Fig. 9)."""

    # fmt: off
    data: str | None = None
    """cifar10, mnist, or the folder; that of the newest study if not given."""
    output: Path = DEFAULT_OUTPUT
    """Folder with the studies."""
    # fmt: on


def report(options: LabelNoiseReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Fig. 9 from the trials of this job's studies, over all their seeds."""
    trials = load_trials("label-noise", job.config, options.output)
    if not trials:
        info("label-noise: no study yet; concord tune label-noise --search grid makes one")
        return {"job": "label-noise", "figures": {}}
    data = None if options.data is None else source(options.data)
    trials = comparable_trials(trials, ("threshold", "lr"), data=data)
    if not trials:
        raise InputError(f"--data {options.data}: no study of label-noise with these images in {options.output}")
    curves: dict[tuple[float, float], list[Any]] = {}
    for trial in trials:
        curves.setdefault((trial.config.aggregation.threshold, trial.config.optimizer.lr), []).append(trial.history)
    folder = options.output / "reports" / "label-noise"
    figure = label_noise_figure(curves, wrong=WRONG, right=RIGHT)
    accuracy = {}
    for (threshold, lr), histories in sorted(curves.items()):
        last = [history[-1].metrics for history in histories]
        accuracy[f"τ={threshold} lr={lr}"] = {
            "wrong labels": [round(metrics.get(f"{WRONG}_accuracy", math.nan), 4) for metrics in last],
            "right labels": [round(metrics.get(f"{RIGHT}_accuracy", math.nan), 4) for metrics in last],
            "test at its peak": [round(max(at.metrics["ood_accuracy"] for at in each), 4) for each in histories],
            "test": [round(metrics["ood_accuracy"], 4) for metrics in last],
        }
    return {
        "job": "label-noise",
        "data": trials[-1].config.images.data,
        "figures": {"curves": str(save(figure, folder / f"curves-{Path(trials[-1].config.images.data).name}.png"))},
        "accuracy": accuracy,
    }


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    # The settings of §3.2 and B.5; the paper found a learning rate of 1e-3 best for the average, 5e-3 for the AND-mask.
    config=LabelNoiseConfig().with_options(
        per_example=True,
        threshold=0.2,
        rescale=False,
        batch_size=80,
        epochs=80,
        held_out=0.0,
        lr=1e-3,
        milestones=(0.75,),
    ),
    reproduces="AND-mask paper §3.2 (label noise): Fig. 9 on MNIST, but for the steady rise; on CIFAR-10 only "
    "500 images",
    report=Report(LabelNoiseReport, report),
    # The average and the AND-mask with the three learning rates of B.5; one seed of the experiment with --search grid.
    studies={"learning-rates": Study(Space({"threshold": Choice(0.0, 0.2), "lr": Choice(5e-4, 1e-3, 5e-3)}))},
)
