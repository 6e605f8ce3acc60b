"""Memorization of random labels (AND-mask paper, §3.2): every example is an environment of its own.

With averaged gradients a network memorizes random labels. If the gradients of a batch's examples must agree in sign, it
cannot memorize them, but it learns the true labels nearly as well. ``concord train memorization`` is one run,
``concord compare memorization fig-8`` makes Fig. 8 and 16, ``… mnist`` a version of them for a laptop.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from concord.environments import Environments, shuffle_labels
from concord.environments.images import ImageOptions
from concord.models.image_network_options import ImageNetworkOptions
from concord.options import group
from concord.space import Choice, Space
from concord.training import Job, Study, TrainConfig


@dataclass(frozen=True, kw_only=True)
class MemorizationConfig(TrainConfig):
    """Memorization of random labels, every example being an environment (AND-mask paper, §3.2, Fig. 8 and 16)."""

    auto_aggregator = "and-mask"

    # fmt: off
    labels: Literal["random", "true"] = "random"
    """Train on shuffled labels, or on the true ones."""
    images: ImageOptions = group(ImageOptions)
    network: ImageNetworkOptions = group(ImageNetworkOptions)
    # fmt: on


def model(config: Any) -> nn.Module:
    """The network of a configuration with ``images`` and ``network``."""
    data = config.images.images(config.data.data)
    channels, height, width = data.train.images.shape[1:]
    network: nn.Module = config.network.network(channels, height, width, data.classes)
    return network


def environments(config: MemorizationConfig) -> Environments:
    """The training images with shuffled labels or their own, and the test images with their own."""
    data = config.images.images(config.data.data)
    labels, _ = shuffle_labels(data.train.labels, 1.0 if config.labels == "random" else 0.0, config.run.seed)
    return Environments.from_arrays(
        {"train": (data.train.images, labels), "test": (data.test.images, data.test.labels)}, test=["test"]
    )


# §3.2 and B.5.
SETTINGS: dict[str, Any] = {
    "per_example": True, "threshold": 0.2, "rescale": False, "batch_size": 80, "epochs": 80, "held_out": 0.0,
}  # fmt: skip
job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=MemorizationConfig().with_options(**SETTINGS, lr=5e-4),
    reproduces="AND-mask paper §3.2 (memorization of random labels): Fig. 8, 16",
    comparisons="tables.py",
    # The thresholds of Fig. 8; 0 averages.
    studies={
        "thresholds": Study(
            Space({"labels": Choice("random", "true"), "threshold": Choice(0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)})
        )
    },
)
