"""Shared by DomainBed's data sets of small images: MNIST divided among environments, a network and its settings.

Appendix D of Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, 2021.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concord.environments import Environments, image_dataset
from concord.environments.collection import generator_for
from concord.models import Pixels

# Its default hyperparameters for small images, and a fifth of every environment held out.
SETTINGS: dict[str, Any] = {"held_out": 0.2, "batch_size": 64, "lr": 1e-3, "schedule": "constant", "aggregator": "mean"}
GROUPS, FEATURES = 8, 128


@functools.lru_cache(maxsize=1)
def _digits(folder: Path | None) -> tuple[Tensor, Tensor]:
    data = image_dataset("mnist", folder)
    return torch.cat([data.train.images, data.test.images])[:, 0], torch.cat([data.train.labels, data.test.labels])


def dealt(folder: Path | None, seed: int, index: int, environments: int) -> tuple[Tensor, Tensor]:
    """An environment's share of the 70,000 shuffled digits, every n-th: images ``(rows, 28, 28)`` uint8, and labels."""
    images, labels = _digits(folder)
    own = torch.randperm(len(labels), generator=generator_for(seed, "domainbed"))[index::environments]
    return images[own], labels[own]


def all_but(load: Callable[[str], tuple[Tensor, Tensor]], names: Sequence[str], left_out: str) -> Environments:
    """These environments; one of them, unless ``left_out`` is none of their names, is the test."""
    test = [name for name in names if name == left_out]
    return Environments(load, [name for name in names if name != left_out], test=test)


def network(channels: int, classes: int) -> nn.Module:
    """DomainBed's MNIST_CNN and a linear classifier; the features are the layer ``features``."""

    def block(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(GROUPS, outputs)]

    layers = [*block(channels, 64), *block(64, FEATURES, 2), *block(FEATURES, FEATURES), *block(FEATURES, FEATURES)]
    features = nn.Sequential(Pixels(), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential()
    model.add_module("features", features)
    model.add_module("classifier", nn.Linear(FEATURES, classes))
    return model
