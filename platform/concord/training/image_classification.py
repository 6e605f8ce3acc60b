"""What the jobs on images share: their options, their data and their networks."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from concord.environments import image_dataset
from concord.environments.images import DATASETS, ImageDataset
from concord.models import MLP, FastResNet, Pixels
from concord.training.options import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(TrainConfig):
    """Images whose every example is an environment of its own; the settings of the AND-mask paper's §3.2 and B.5."""

    # fmt: off
    data: str = "cifar10"
    """cifar10, mnist, or a folder of your own with train/CLASS/IMAGE and test/CLASS/IMAGE."""
    model: Literal["fast-resnet", "mlp"] = "fast-resnet"
    """The paper's FastResNet (halves an image three times: at least 8 × 8), or a small MLP."""
    hidden_units: int = 256
    """Width of the MLP's hidden layers."""
    hidden_layers: int = 2
    """Number of the MLP's hidden layers."""
    batch_norm: bool = False
    """Batch normalization in the MLP; FastResNet has it."""
    train_images: int = 0
    """Train on the first so many images; 0 takes all."""
    test_images: int = 0
    """Test on the first so many images; 0 takes all."""

    per_example: bool = True
    """Let every example be an environment of its own: the aggregator compares the examples of a batch."""
    threshold: float = 0.2
    """Agreement threshold τ of the masks, in [0, 1]; 0 averages."""
    rescale: bool = False
    """Divide each layer's update by the fraction of it that the mask kept."""
    batch_size: int = 80
    """Examples of a batch."""
    epochs: int = 80
    """Passes over the training images."""
    lr: float = 5e-4
    """Learning rate."""
    held_out: float = 0.0
    """Fraction of the training images that training never sees; [0, 1)."""
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "data", source(self.data))  # here, since a worker runs elsewhere

    def unused(self) -> frozenset[str]:
        """Also the MLP's options where there is none."""
        mlp = ("hidden_units", "hidden_layers", "batch_norm")
        return super().unused() | (frozenset(mlp) if self.model != "mlp" else frozenset())

    def check(self) -> None:
        """Also refuse what makes no data and no network."""
        super().check()
        for option in ("train_images", "test_images"):
            self.require(option, getattr(self, option) >= 0, "must not be negative")
        for option in ("hidden_units", "hidden_layers"):
            self.require(option, getattr(self, option) >= 1, "must be at least 1")


def source(data: str) -> str:
    """What ``--data`` names: a dataset, or a folder by its absolute path, a worker runs elsewhere."""
    return data if data in DATASETS else str(Path(data).absolute())


def images(config: ImagesConfig) -> ImageDataset:
    """The images of this configuration, as many as it says; kept, so that they are read once a process.

    Raises:
        InputError: see :func:`concord.environments.image_dataset`.
    """
    return _images(config.data, config.data_dir, config.train_images, config.test_images)


@functools.lru_cache(maxsize=1)
def _images(data: str, data_dir: Path | None, train: int, test: int) -> ImageDataset:
    whole = image_dataset(data, data_dir)
    return ImageDataset(whole.train.first(train), whole.test.first(test), whole.classes)


def network(config: ImagesConfig) -> nn.Module:
    """FastResNet or an MLP for these images, which takes them as bytes.

    Raises:
        InputError: the images are too small for FastResNet.
    """
    data = images(config)
    channels, height, width = data.train.images.shape[1:]
    if config.model == "fast-resnet":
        config.require("model", min(height, width) >= 8, f"images of {height} × {width} are too small; take mlp")
        return FastResNet(channels, data.classes)
    return nn.Sequential(
        Pixels(),
        MLP(
            channels * height * width,
            data.classes,
            config.hidden_units,
            config.hidden_layers,
            batch_norm=config.batch_norm,
        ),
    )
