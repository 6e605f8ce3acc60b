"""Shared by DomainBed's data sets of small images: MNIST divided among environments, a network, settings and spaces.

Appendix D of Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, 2021; for later methods, the spaces that
their authors added to DomainBed.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concord.environments import image_dataset
from concord.environments.collection import generator_for
from concord.models import Pixels
from concord.space import Choice, Entry, LogUniform, Space, Uniform
from concord.training import Study

STEPS = 5001  # of a run in DomainBed
# Its default hyperparameters for small images, and a fifth of every environment held out.
SETTINGS: dict[str, Any] = {"held_out": 0.2, "batch_size": 64, "lr": 1e-3, "schedule": "constant", "aggregator": "mean"}
GROUPS, FEATURES = 8, 128


@functools.lru_cache(maxsize=1)
def _digits(data_dir: Path | None) -> tuple[Tensor, Tensor]:
    data = image_dataset("mnist", data_dir)
    return torch.cat([data.train.images, data.test.images])[:, 0], torch.cat([data.train.labels, data.test.labels])


def dealt(data_dir: Path | None, seed: int, index: int, environments: int) -> tuple[Tensor, Tensor]:
    """An environment's share of the 70,000 shuffled digits, every n-th: images ``(rows, 28, 28)`` uint8, and labels."""
    images, labels = _digits(data_dir)
    own = torch.randperm(len(labels), generator=generator_for(seed, "domainbed"))[index::environments]
    return images[own], labels[own]


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


def _study(**entries: Any) -> Study:
    shared: dict[str, Entry] = {
        "lr": LogUniform(10**-4.5, 10**-2.5),
        "batch_size": Choice(8, 16, 32, 64, 128, 256, 512),
    }
    return Study(Space({**shared, **entries}))


def _objective(name: str, **entries: Any) -> Study:
    return _study(objective=name, aggregator="mean", **entries)


def _warmup(low: float, high: float) -> Any:
    """The steps of DomainBed's annealing as a fraction of its run."""
    return LogUniform(low / STEPS, min(high / STEPS, 0.999))


def studies() -> dict[str, Study]:
    """DomainBed's spaces of the methods that Concord also has; batch sizes are powers of two."""
    penalty = {"penalty_weight": LogUniform(0.1, 1e5), "penalty_warmup": _warmup(1, 1e4)}
    moments = {"penalty_weight": LogUniform(0.1, 10.0)}
    return {
        "erm": _study(aggregator="mean"),
        "irm": _objective("irm", **penalty),
        "vrex": _objective("vrex", **penalty),
        "group-dro": _objective("group-dro", group_rate=LogUniform(1e-3, 1e-1)),
        "mixup": _objective("mixup", mixup_alpha=LogUniform(0.1, 10.0)),
        "coral": _objective("coral", **moments),
        "mmd": _objective("mmd", **moments),
        "sd": _objective("sd", penalty_weight=LogUniform(1e-5, 0.1)),
        "iga": _objective("iga", penalty_weight=LogUniform(10.0, 1e5)),
        # DomainBed's λ, 10 to 10,000, is our weight times the classifier's number of weights, 258 or 1,290.
        "fishr": _objective(
            "fishr",
            penalty_weight=LogUniform(10 / 1290, 10_000 / 258),
            penalty_warmup=Uniform(0.0, 0.999),
            variance_momentum=Uniform(0.9, 0.99),
        ),
        "eqrm": _objective("eqrm", quantile=Uniform(0.5, 0.99), penalty_warmup=_warmup(10**2.5, 10**3.5)),
        "and-mask": _study(aggregator="and-mask", threshold=Uniform(0.5, 1.0)),
        "sand-mask": _study(aggregator="sand-mask", threshold=Uniform(0.0, 1.0)),
    }
