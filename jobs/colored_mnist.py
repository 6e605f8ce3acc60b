"""Colored MNIST: a colour that misleads in the test (Bae et al., Meta-Learned Invariant Risk Minimization, section 4).

``concord train colored-mnist --objective irm`` trains one model; ``concord report colored-mnist`` makes the paper's
tables and figures over seeds.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from concord.environments import ColoredMNIST, Environments, image_dataset
from concord.environments.images import ImageDataset
from concord.models import MLP, Pixels
from concord.objectives import ObjectiveName
from concord.training import Job, TrainConfig


@dataclass(frozen=True, kw_only=True)
class ColoredMNISTConfig(TrainConfig):
    """Colored MNIST: two training environments whose colours mislead seldom, tests whose colours mislead more."""

    # fmt: off
    classes: int = 2
    """Classes, and colours: 2, 5 or 10."""
    flips: tuple[float, ...] = (0.1, 0.2)
    """How often the colour misleads in each training environment, p_e."""
    test_flip: float = 0.9
    """How often it misleads in the test."""
    observed_flips: tuple[float, ...] = (0.1, 0.2)
    """More tests, which are only reported on."""
    noise: float = 0.25
    """How often the label is wrong, η."""
    noise_gap: float = 0.0
    """How much more often in the first training environment than in the last; the mean stays."""
    examples: int = 25_000
    """Examples to train on in each environment; its held-out part comes on top."""
    patch_flips: tuple[float, ...] = ()
    """How often a second shortcut, a patch in a corner, misleads in each training environment; none has no patch."""
    grey: bool = False
    """Images without colour."""
    side: int = 14
    """Pixels of a side: 14, or 28."""

    hidden_units: int = 256
    """Width of the hidden layers."""
    hidden_layers: int = 1
    """Number of hidden layers."""

    held_out: float = 1 / 6
    """Fraction of every training environment that training never sees; [0, 1)."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """What layers compute in while training: bfloat16 (autocast) is faster where the hardware has it."""
    objective: ObjectiveName = "irm"
    """What is minimized."""
    # fmt: on


@functools.lru_cache(maxsize=1)
def digits(data_dir: Path | None) -> ImageDataset:
    """MNIST, read once a process."""
    return image_dataset("mnist", data_dir)


def environments(config: ColoredMNISTConfig) -> Environments:
    """The coloured digits."""
    data = digits(config.data_dir)
    return ColoredMNIST(
        data.train,
        data.test,
        flips=config.flips,
        test_flip=config.test_flip,
        observed_flips=config.observed_flips,
        examples=round(config.examples / (1 - config.held_out)),
        classes=config.classes,
        noise=config.noise,
        noise_gap=config.noise_gap,
        patch_flips=config.patch_flips,
        grey=config.grey,
        side=config.side,
        seed=config.seed,
    ).as_environments()


def model(config: ColoredMNISTConfig) -> nn.Module:
    """An MLP with ReLU, on pixels of 0 to 1."""
    channels = 1 if config.grey else config.classes
    width = channels * config.side**2
    return nn.Sequential(
        Pixels(), MLP(width, config.classes, config.hidden_units, config.hidden_layers, activation="relu")
    )


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=ColoredMNISTConfig,
    reproduces="meta-IRM paper, section 4",
)
