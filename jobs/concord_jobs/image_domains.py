"""Your own images in domains: ``DOMAIN/CLASS/IMAGE``, classified by a network of torchvision as DomainBed does it.

Gulrajani and Lopez-Paz, In search of lost domain generalization (2021): the network begins at given weights, batch norm
keeps their statistics, images are cropped, flipped, recoloured and sometimes grey. The average is their ERM.
"""

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from concord.environments import Environments, from_image_folder
from concord.environments.data_files import missing
from concord.environments.datasets import Transform
from concord.environments.image_folder import longest_side
from concord.errors import ArgumentError, InputError, InputWarning, first_line
from concord.extras import install_command
from concord.models.pixels import Pixels
from concord.options import OptionGroup, group
from concord.storage import check_address, display_path, local, resolve
from concord.training import Job, TrainConfig
from concord.training.options import DataOptions
from concord_jobs.domainbed.spaces import PHOTOGRAPHS

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels
HEADS = {"resnet18": "fc", "resnet50": "fc", "vit-b-16": "heads.head"}
PATCH = 16  # of the ViT
_SMALLEST, _LARGEST = 32, 224  # sides of images
# Adam's learning rates of DomainBed: pretrained networks, and networks that begin at random.
_PRETRAINED_LR, _RANDOM_LR = 5e-5, 1e-3
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ImageData(DataOptions):
    """The images, and the data of a run."""

    # fmt: off
    data: Path | None = None
    """Folder with DOMAIN/CLASS/IMAGE."""
    # fmt: on

    def __post_init__(self) -> None:
        if self.data is not None:  # made absolute here, since a worker has another working directory
            object.__setattr__(self, "data", resolve(self.data))

    def check(self) -> None:
        """Validate options."""
        super().check()
        if self.data is None:
            raise ArgumentError("data", None, "needed; give a folder with DOMAIN/CLASS/IMAGE")


@dataclass(frozen=True, kw_only=True)
class DomainOptions(OptionGroup):
    """The domains."""

    # fmt: off
    test: tuple[str, ...] = ()
    """Domains to test on."""
    validation: tuple[str, ...] = ()
    """Domains that select models."""
    image_size: int | None = None
    """Height and width to which images are resized; by default 224 with --weights, else the longest side of the images,
    from 32 to 224."""
    augment: bool = True
    """DomainBed's augmentation: random crops of 0.7 to 1, flips and colours; one image in ten is grey."""
    skip_unreadable: bool = False
    """Leave out images that cannot be read, with a warning."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        right = self.image_size is None or self.image_size >= _SMALLEST
        self.require("image_size", right, f"must be at least {_SMALLEST}")


@dataclass(frozen=True, kw_only=True)
class VisionOptions(OptionGroup):
    """The network."""

    # fmt: off
    network: Literal["resnet18", "resnet50", "vit-b-16"] = "resnet18"
    """Network of torchvision."""
    weights: Path | None = None
    """Safetensors file with the first weights, by torchvision's names, but for the last layer; by default random."""
    batch_norm: Literal["auto", "frozen", "trained"] = "auto"
    """Keep the statistics of the given weights (frozen) or update them (trained); auto is frozen with --weights."""
    # fmt: on

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", resolve(self.weights))

    def check(self) -> None:
        """Validate options."""
        if self.weights is not None:
            check_address("weights", self.weights)

    @property
    def frozen(self) -> bool:
        """Whether batch norm keeps its statistics."""
        return self.batch_norm == "frozen" or (self.batch_norm == "auto" and self.weights is not None)


@dataclass(frozen=True, kw_only=True)
class ImageDomainsConfig(TrainConfig):
    """Images of several domains, read from a folder while training."""

    # fmt: off
    data: ImageData = group(ImageData)
    domains: DomainOptions = group(DomainOptions)
    vision: VisionOptions = group(VisionOptions)
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        size, vit = self.domains.image_size, self.vision.network == "vit-b-16"
        right = not vit or size is None or size % PATCH == 0
        self.require("image_size", right, f"must be a multiple of {PATCH}, the patches of vit-b-16")

    @property
    def image_size(self) -> int:
        """Height and width of the network's images: as asked for, else as the folder has them."""
        assert self.data.data is not None  # as checked
        if self.domains.image_size is not None:
            return self.domains.image_size
        if self.vision.weights is not None:
            return _LARGEST
        size = min(max(_SMALLEST, _longest_side(self.data.data) or _LARGEST), _LARGEST)
        return -(-size // PATCH) * PATCH if self.vision.network == "vit-b-16" else size


class VisionNetwork(nn.Module):
    """A network of torchvision that takes bytes; frozen batch norm keeps its statistics in training.

    Input ``(images, 3, height, width)``, bytes or floating point of 0 to 1; output logits ``(images, classes)``.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, frozen: bool) -> None:
        super().__init__()
        self.pixels, self.network, self.frozen = Pixels(), network, frozen
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION).view(3, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> "VisionNetwork":
        """Set training mode; frozen batch norm stays in evaluation mode."""
        super().train(mode)
        for module in self.modules():
            if self.frozen and isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        scaled = (self.pixels(images) - self.mean) / self.deviation
        logits: Tensor = self.network(scaled.contiguous(memory_format=torch.channels_last))
        return logits


def torchvision() -> Any:
    """The package torchvision, an extra."""
    try:
        import torchvision
        import torchvision.transforms
    except ModuleNotFoundError as error:
        raise InputError(f"image-domains needs torchvision: {install_command('images')}") from error
    except (ImportError, RuntimeError) as error:  # its operators are compiled for one version of torch
        raise InputError(
            f"image-domains: torchvision does not fit torch {torch.__version__} ({first_line(error)}): "
            f"{install_command('images', replaced='torchvision')}"
        ) from error
    return torchvision


def augmentation(size: int) -> Transform:
    """DomainBed's augmentation of a Pillow image; the network does the normalization."""
    transforms = torchvision().transforms
    composed: Transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.7, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
            transforms.RandomGrayscale(),
        ]
    )
    return composed


_longest_side = functools.lru_cache(maxsize=1)(longest_side)


@functools.lru_cache(maxsize=1)
def _images(folder: Path, options: DomainOptions, size: int) -> Environments:
    return from_image_folder(
        folder,
        size=size,
        validation=options.validation,
        test=options.test,
        augment=augmentation(size) if options.augment else None,
        skip_unreadable=options.skip_unreadable,
    )


def environments(config: ImageDomainsConfig) -> Environments:
    """An environment for each domain; the folder is listed once in each process."""
    assert config.data.data is not None  # as checked
    return _images(config.data.data, config.domains, config.image_size)


def model(config: ImageDomainsConfig) -> nn.Module:
    """The network, with a new last layer for the folder's classes."""
    options, classes = config.vision, environments(config).classes
    assert classes is not None
    sizes = {"image_size": config.image_size} if options.network == "vit-b-16" else {}
    make = getattr(torchvision().models, options.network.replace("-", "_"))
    network: nn.Module = make(num_classes=len(classes), **sizes)
    if options.weights is None and config.optimizer.lr <= _PRETRAINED_LR:
        warnings.warn(
            f"--lr {config.optimizer.lr:g} is meant for pretrained --weights; from random ones a network hardly learns "
            f"with it: give --weights FILE, or --lr {_RANDOM_LR:g}",
            InputWarning,
            stacklevel=2,
        )
    if options.weights is not None:
        load_weights(network, options.weights, HEADS[options.network], options.network)
    return VisionNetwork(network, options.frozen)


def load_weights(network: nn.Module, path: Path, head: str, name: str) -> None:
    """Load all weights except the head's."""
    shown, here = display_path(path), local(path)
    if not here.is_file():
        raise missing(path, "file", "weights")
    try:
        given = load_file(here)
    except (SafetensorError, OSError) as error:
        raise ArgumentError("weights", shown, f"cannot be read as safetensors ({first_line(error)})") from error
    own = {key: value for key, value in network.state_dict().items() if not key.startswith(f"{head}.")}
    given = {key: value for key, value in given.items() if not key.startswith(f"{head}.")}
    needed = {key for key in own if not key.endswith("num_batches_tracked")}  # counters for training
    differing = {
        "lacks": needed - given.keys(),
        "has": given.keys() - own.keys(),
        "has another shape of": {key for key in own.keys() & given.keys() if own[key].shape != given[key].shape},
    }
    if any(differing.values()):
        found = "; ".join(f"{what} {_named(names)}" for what, names in differing.items() if names)
        raise ArgumentError("weights", shown, f"are not of {name}: the file {found}")
    network.load_state_dict(given, strict=False)


def _named(names: set[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more


job = Job(
    environments,
    model,
    nn.functional.cross_entropy,
    # One by one is fastest for a few environments with large convolutions, and vmap does not support channels-last.
    config=ImageDomainsConfig().with_options(
        batch_size=32, lr=_PRETRAINED_LR, held_out=0.2, epochs=30, readers=2, vectorize="one-by-one"
    ),
    studies=PHOTOGRAPHS,
    reproduces="no paper's result: for images of your own",
)
