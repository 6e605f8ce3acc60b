"""DomainBed's RotatedMNIST: digits turned by 0 to 75 degrees, an environment each.

Ghifary et al., Domain Generalization for Object Recognition with Multi-task Autoencoders, 2015, as Gulrajani and
Lopez-Paz, In Search of Lost Domain Generalization, 2021, make it.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from concord.environments import Environments
from concord.training import Job, TrainConfig
from concord_jobs.domainbed.small_images import SETTINGS, all_but, dealt, network
from concord_jobs.domainbed.spaces import SMALL_IMAGES
from concord_jobs.domainbed.tables import table

ANGLES = ("0", "15", "30", "45", "60", "75")
CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class RotatedMNISTConfig(TrainConfig):
    """Digits turned by five angles, and by a sixth for the test."""

    # fmt: off
    test_angle: Literal["0", "15", "30", "45", "60", "75", "none"] = "75"
    """Angle to test on, in degrees; none trains on all six."""
    # fmt: on


@functools.lru_cache(maxsize=len(ANGLES))
def turned(folder: Path | None, seed: int, angle: str) -> tuple[Tensor, Tensor]:
    """The digits of an angle: images ``(11666 or 11667, 1, 28, 28)`` uint8, turned anticlockwise, and labels."""
    images, labels = dealt(folder, seed, ANGLES.index(angle), len(ANGLES))
    rotated = [
        np.asarray(Image.fromarray(each).rotate(int(angle), Image.Resampling.BILINEAR)) for each in images.numpy()
    ]
    return torch.from_numpy(np.stack(rotated)).unsqueeze(1), labels


def environments(config: RotatedMNISTConfig) -> Environments:
    """An environment for each angle."""
    return all_but(functools.partial(turned, config.data.data, config.run.seed), ANGLES, config.test_angle)


def model(config: RotatedMNISTConfig) -> nn.Module:
    """DomainBed's network for small images."""
    return network(1, CLASSES)


job = Job(
    environments,
    model,
    nn.functional.cross_entropy,
    config=RotatedMNISTConfig().with_options(**SETTINGS, epochs=7),
    studies=SMALL_IMAGES,
    reproduces="DomainBed: RotatedMNIST, with a fifth of its steps",
    comparisons={"domainbed": table("RotatedMNIST", "test_angle", ANGLES, {"ERM": "95.9 98.9 98.8 98.9 98.9 96.4"})},
)
