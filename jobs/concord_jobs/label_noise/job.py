"""Label noise (AND-mask paper, §3.2): a quarter of the training labels is shuffled, every example is an environment.

With averaged gradients the network first learns the images, then memorizes the wrong labels, and its test accuracy
falls after a peak. If the examples' gradients must agree, it learns only what holds for all examples.
``concord compare label-noise fig-9`` makes Fig. 9, ``concord compare label-noise mnist`` a version of it for a laptop.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from concord.environments import Environments, shuffle_labels
from concord.environments.images import ImageOptions
from concord.models.image_network_options import ImageNetworkOptions
from concord.options import group
from concord.space import Choice, Space
from concord.training import Job, Study, TrainConfig
from concord_jobs.memorization.job import SETTINGS, model

WRONG, RIGHT = "wrong_labels", "right_labels"


@dataclass(frozen=True, kw_only=True)
class LabelNoiseConfig(TrainConfig):
    """Training with shuffled labels among the true ones (AND-mask paper, §3.2, Fig. 9)."""

    auto_aggregator = "and-mask"

    # fmt: off
    label_noise: float = 0.25
    """Fraction of the training labels that are shuffled among themselves."""
    images: ImageOptions = group(ImageOptions)
    network: ImageNetworkOptions = group(ImageNetworkOptions)
    # fmt: on


def environments(config: LabelNoiseConfig) -> Environments:
    """The training images, the parts of them with wrong and with right labels, and the test images."""
    data = config.images.images(config.data.data)
    labels, wrong = shuffle_labels(data.train.labels, config.label_noise, config.run.seed)
    parts = {"train": torch.ones_like(wrong), WRONG: wrong, RIGHT: ~wrong}
    parts = {name: part for name, part in parts.items() if bool(part.any())}

    def load(name: str) -> tuple[Any, Any]:
        if name == "test":
            return data.test.images, data.test.labels
        return data.train.images[parts[name]], labels[parts[name]]

    return Environments(load, ["train"], test=["test"], monitored=[name for name in parts if name != "train"])


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    # The paper found a learning rate of 1e-3 best for the average, 5e-3 for the AND-mask.
    config=LabelNoiseConfig().with_options(**SETTINGS, lr=1e-3, milestones=(0.75,)),
    reproduces="AND-mask paper §3.2 (label noise): Fig. 9",
    comparisons="tables.py",
    # The average and the AND-mask with the three learning rates of B.5.
    studies={"learning-rates": Study(Space({"threshold": Choice(0.0, 0.2), "lr": Choice(5e-4, 1e-3, 5e-3)}))},
)
