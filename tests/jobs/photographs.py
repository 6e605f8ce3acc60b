"""A job that reads images from a folder while it trains, augmented by all three random generators."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from concord.environments import from_image_folder
from concord.models.pixels import Pixels
from concord.training import Job, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    images: Path = Path("images")


def augment(image: Any) -> Any:
    """A crop at a place drawn by PyTorch and NumPy, with a flip drawn by Python."""
    left, top = int(torch.randint(0, 4, ())), np.random.randint(0, 4)
    image = image.crop((left, top, left + 8, top + 8))
    return image.transpose(0) if random.random() < 0.5 else image


def environments(config: Config) -> Any:
    with (config.images / "looked through").open("a") as notes:
        notes.write("once\n")
    return from_image_folder(config.images, size=8, test=["night"], augment=augment)


job = Job(
    environments,
    lambda _: nn.Sequential(Pixels(), nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)),
    nn.functional.cross_entropy,
    config=Config().with_options(batch_size=8, epochs=2, lr=1e-2, aggregator="mean"),
)
