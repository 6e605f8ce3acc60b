"""Options of a job's images."""

import functools
from dataclasses import dataclass
from pathlib import Path

from concord.environments.images import DATASETS, ImageDataset, image_dataset
from concord.options import OptionGroup
from concord.storage import check_address, resolve


@dataclass(frozen=True, kw_only=True)
class ImageOptions(OptionGroup):
    """The images of a job."""

    # fmt: off
    data: str = "cifar10"
    """cifar10, mnist, or a folder of your own with train/CLASS/IMAGE and test/CLASS/IMAGE."""
    train_images: int = 0
    """Number of training images, from the first; 0 takes all."""
    test_images: int = 0
    """Number of test images, from the first; 0 takes all."""
    # fmt: on

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", source(self.data))  # here, since a worker has another working directory

    def check(self) -> None:
        """Validate options."""
        check_address("data", Path(self.data))
        self.require_at_least(0, "train_images", "test_images")

    def images(self, data_dir: Path | None) -> ImageDataset:
        """The images of these options; cached, so that a process reads them once."""
        return _images(self.data, data_dir, self.train_images, self.test_images)


def source(data: str) -> str:
    """The value of ``--data``: a dataset, an address, or a folder made absolute, since a worker has another working
    directory."""
    return data if data in DATASETS else str(resolve(Path(data)))


@functools.lru_cache(maxsize=1)
def _images(data: str, data_dir: Path | None, train: int, test: int) -> ImageDataset:
    whole = image_dataset(data, data_dir)
    return ImageDataset(whole.train.first(train), whole.test.first(test), whole.classes)
