"""Labelled images: MNIST, CIFAR-10, or a folder of the user's, and the options that choose them."""

import contextlib
import functools
import gzip
import io
import struct
import tarfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from concord.environments.data_files import data_files
from concord.environments.files import RemoteFile, check_sha256, data_folders, download, find
from concord.environments.row_names import OF_ONE_FILE
from concord.errors import ArgumentError, InputError, first_line
from concord.options import OptionGroup
from concord.storage import check_address, display_path, is_remote, local

if TYPE_CHECKING:
    from PIL import Image

Pixels = npt.NDArray[np.uint8]

_MNIST_HOMES = ("https://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
_MNIST = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
# The binary version: the others are pickles, or in Matlab's format.
_CIFAR10 = RemoteFile(
    "cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
_CIFAR10_FILES = {
    "train": [f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["cifar-10-batches-bin/test_batch.bin"],
}
_CIFAR10_RECORD = 1 + 3 * 32 * 32
IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
_CLASSES = 10


@dataclass(frozen=True)
class LabelledImages:
    """Images with the numbers of their classes.

    Attributes:
        images: ``(images, channels, height, width)`` uint8.
        labels: ``(images,)`` int64, from 0.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> "LabelledImages":
        """The first ``count`` images; all if there are no more, or for 0."""
        return self if count == 0 else LabelledImages(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class ImageDataset:
    """A training and a test set.

    Attributes:
        train, test: the two, alike in channels, height and width.
        classes: the number of classes.
    """

    train: LabelledImages
    test: LabelledImages
    classes: int

    @staticmethod
    def of(name: str, train: LabelledImages, test: LabelledImages, classes: int) -> "ImageDataset":
        """A dataset of both, which need images of one size (InputError)."""
        if train.images.shape[1:] != test.images.shape[1:]:
            raise InputError(
                f"{name}: images of (channels, height, width) {tuple(train.images.shape[1:])} in the training set, but "
                f"{tuple(test.images.shape[1:])} in the test set; give all one size"
            )
        return ImageDataset(train, test, classes)


def image_dataset(dataset: str, data: Path | None) -> ImageDataset:
    """The dataset of this name, or in this folder.

    Args:
        dataset: ``mnist``: its four IDX files, compressed or not. ``cifar10``: its own binary archive, or
            ``train.parquet`` and ``test.parquet`` with image files in a column ``img`` (or ``image``) and a column
            ``label``. Any other: a folder with ``train/CLASS/IMAGE`` and ``test/CLASS/IMAGE``, all images of one
            size, the same classes in both.
        data: the folder with MNIST or CIFAR-10, or with folders ``mnist`` and ``cifar10``. With None they are
            downloaded and checked.

    Raises:
        InputError: a file is missing, incomplete, or of another kind.
    """
    folders = data_folders(dataset, data)
    if dataset == "mnist":
        return _mnist(folders)
    if dataset == "cifar10":
        return _cifar10(folders)
    return _image_folder(_own_folder(Path(dataset)))


@dataclass(frozen=True, kw_only=True)
class ImageOptions(OptionGroup):
    """The images of a job."""

    # fmt: off
    dataset: Literal["cifar10", "mnist", "folder"] = "cifar10"
    """Images: CIFAR-10, MNIST, or your own in a folder --data with train/CLASS/IMAGE and test/CLASS/IMAGE."""
    train_images: int = 0
    """Number of training images, from the first; 0 takes all."""
    test_images: int = 0
    """Number of test images, from the first; 0 takes all."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(0, "train_images", "test_images")

    def images(self, data: Path | None) -> ImageDataset:
        """The images of these options; cached, so that a process reads them once."""
        if self.dataset != "folder":
            return _images(self.dataset, data, self.train_images, self.test_images)
        if data is None:
            raise ArgumentError("data", None, "needed; give a folder with train/CLASS/IMAGE and test/CLASS/IMAGE")
        return _images(str(data), None, self.train_images, self.test_images)


@functools.lru_cache(maxsize=1)
def _images(dataset: str, data: Path | None, train: int, test: int) -> ImageDataset:
    whole = image_dataset(dataset, data)
    return ImageDataset(whole.train.first(train), whole.test.first(test), whole.classes)


def _mnist(folders: Sequence[Path]) -> ImageDataset:
    def array(name: str) -> Pixels:
        path = find([name, f"{name}.gz"], folders)
        if path is None and folders:
            raise ArgumentError(
                "data", display_path(folders[-1]), f"has neither {name} nor {name}.gz, nor does its folder mnist"
            )
        if path is None:
            urls = tuple(f"{home}{name}.gz" for home in _MNIST_HOMES)
            path = download(RemoteFile(f"{name}.gz", _MNIST[name], urls), "mnist")
        return read_idx(path)

    def part(name: str) -> LabelledImages:
        images, labels = array(f"{name}-images-idx3-ubyte"), array(f"{name}-labels-idx1-ubyte")
        if images.ndim != 3 or labels.ndim != 1:
            raise InputError(f"mnist: {name} has images of shape {images.shape}, labels of {labels.shape}")
        return _labelled(f"mnist {name}", images[:, None], labels, _CLASSES)

    return ImageDataset.of("mnist", part("train"), part("t10k"), _CLASSES)


def read_idx(path: Path) -> Pixels:
    """An array of bytes from an IDX file, compressed (``.gz``) or not."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); it is incomplete, or not a gzip file") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise InputError(f"{path}: is not an IDX file of bytes (it begins with {content[:4].hex() or 'nothing'})")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    if len(content) != start + int(np.prod(shape)):
        raise InputError(f"{path}: has {len(content)} bytes, expected {start + int(np.prod(shape))}; it is incomplete")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _cifar10(folders: Sequence[Path]) -> ImageDataset:
    train, test = find(["train.parquet"], folders), find(["test.parquet"], folders)
    archive = find([_CIFAR10.name], folders)
    if archive is None and train is not None and test is not None:
        return ImageDataset.of("cifar10", _parquet(train), _parquet(test), _CLASSES)
    if archive is None and folders:
        raise ArgumentError(
            "data",
            display_path(folders[-1]),
            f"has neither {_CIFAR10.name} nor train.parquet and test.parquet, nor does its folder cifar10",
        )
    if archive is None:
        archive = download(_CIFAR10, "cifar10")
    else:
        assert _CIFAR10.sha256 is not None
        check_sha256(archive, _CIFAR10.sha256)
    return read_cifar10(archive)


def read_cifar10(archive: Path) -> ImageDataset:
    """CIFAR-10 from its binary archive: records of a label and 3 × 32 × 32 bytes."""
    parts = {}
    try:
        with tarfile.open(archive) as files:
            for part, names in _CIFAR10_FILES.items():
                members = [files.extractfile(name) for name in names]
                parts[part] = b"".join(member.read() for member in members if member is not None)
    except (OSError, EOFError, KeyError, zlib.error, tarfile.TarError) as error:
        raise InputError(f"{archive}: cannot be read ({error}); it is incomplete, or not CIFAR-10's archive") from error

    def labelled(part: str) -> LabelledImages:
        records = np.frombuffer(parts[part], np.uint8)
        if len(records) == 0 or len(records) % _CIFAR10_RECORD:
            raise InputError(f"{archive}: {len(records)} bytes of {part} images, not a multiple of {_CIFAR10_RECORD}")
        records = records.reshape(-1, _CIFAR10_RECORD)
        return _labelled(f"{archive} {part}", records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0], _CLASSES)

    return ImageDataset(labelled("train"), labelled("test"), _CLASSES)


def _parquet(path: Path) -> LabelledImages:
    import pyarrow as pa

    from concord.environments.parquet import read_table

    try:
        table = read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)}); it is incomplete, or not parquet") from error
    column = next((name for name in ("img", "image") if name in table.column_names), None)
    if column is None or "label" not in table.column_names:
        raise InputError(f"{path}: needs columns img (or image) and label; it has {', '.join(table.column_names)}")
    # Hugging Face stores an image as a structure of bytes and path.
    files: list[Any] = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in table[column].to_pylist()]
    for row, file in enumerate(files):
        if not isinstance(file, bytes):
            raise InputError(
                f"{path}: {OF_ONE_FILE(row)}: {column} is of type {type(file).__name__}, expected an image file's bytes"
            )
    if table["label"].null_count or not pa.types.is_integer(table["label"].type):
        raise InputError(
            f"{path}: label is {table['label'].type}, {table['label'].null_count} missing; expected integers"
        )
    images = _decoded([(f"{path}: {OF_ONE_FILE(row)}", io.BytesIO(file)) for row, file in enumerate(files)])
    return _labelled(str(path), images, np.asarray(table["label"]), _CLASSES)


def _own_folder(folder: Path) -> Path:
    check_address("data", folder)
    here = local(folder)
    if is_remote(folder) and not here.is_dir():
        raise ArgumentError("data", display_path(folder), "there is no such folder")
    return here


def _image_folder(folder: Path) -> ImageDataset:
    if not folder.is_dir():
        raise ArgumentError("data", folder, "is not a folder with images")
    found: dict[str, dict[str, list[Path]]] = {}
    for part in ("train", "test"):
        nothing, place = f"no images in {part}/CLASS/ with endings {' '.join(IMAGE_ENDINGS)}", "CLASS/IMAGE"
        images = data_files(
            folder / part, IMAGE_ENDINGS, option="data", shown=str(folder), place=place, nothing=nothing, one_each=False
        )
        if images is None:
            raise ArgumentError("data", folder, nothing)
        classes = sorted(each for each in folder.glob(f"{part}/*") if each.is_dir() and not each.name.startswith("."))
        found[part] = {each.name: [] for each in classes}
        for name in images:
            found[part][name.split("/")[0]].append(folder / part / name)
    names = list(found["train"])
    if empty := next((name for name, files in found["train"].items() if not files), None):
        raise ArgumentError("data", folder, f"has no image in train/{empty}")
    if stranger := next((name for name in found["test"] if name not in names), None):
        raise ArgumentError("data", folder, f"has test/{stranger}, but no class of this name in train/")

    def labelled(part: str) -> LabelledImages:
        files = [(file, names.index(name)) for name, each in found[part].items() for file in each]
        images = _decoded([(str(file), file) for file, _ in files])
        return _labelled(f"{folder}/{part}", images, np.array([label for _, label in files]), len(names))

    return ImageDataset.of(str(folder), labelled("train"), labelled("test"), len(names))


def plain_image(image: "Image.Image", mode: str) -> "Image.Image":
    """An image of Pillow with 8 bits a channel, turned as its EXIF orientation says, without transparency.

    ``mode`` is ``L`` or ``RGB``. Raises ValueError if it has more bits.
    """
    from PIL import ImageOps

    require_8_bits(image)
    with contextlib.suppress(SyntaxError, ValueError, struct.error):  # an EXIF part that Pillow cannot read
        ImageOps.exif_transpose(image, in_place=True)
    if "transparency" in image.info and image.mode == "P":  # else Pillow warns
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def require_8_bits(image: "Image.Image") -> None:
    """Refuse an image of Pillow with more than 8 bits a channel (ValueError)."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"mode {image.mode} has more than 8 bits a channel; scale it to 8")


def _decoded(files: Sequence[tuple[str, io.BytesIO | Path]]) -> Pixels:
    """The pixels of image files ``(name, file)``, ``(images, channels, height, width)``."""
    from PIL import Image

    def pixels(entry: tuple[str, io.BytesIO | Path]) -> Pixels:
        name, file = entry
        try:
            with Image.open(file) as image:
                grey = Image.getmodebase(image.mode) == "L"
                array = np.asarray(plain_image(image, "L" if grey else "RGB"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(f"{name}: cannot be read as an image ({first_line(error)})") from error
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)

    if not files:
        return np.zeros((0, 0, 0, 0), np.uint8)
    with ThreadPoolExecutor() as threads:
        arrays = list(threads.map(pixels, files))
    for (name, _), array in zip(files, arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise InputError(
                f"{name}: an image of (channels, height, width) {array.shape}, but {arrays[0].shape} in {files[0][0]}; "
                "all must have one size"
            )
    return np.stack(arrays)


def _labelled(name: str, images: Pixels, labels: npt.NDArray[np.integer], classes: int) -> LabelledImages:  # type: ignore[type-arg]
    if len(images) == 0:
        raise InputError(f"{name}: has no images")
    if len(images) != len(labels):
        raise InputError(f"{name}: {len(images)} images and {len(labels)} labels; the numbers must be equal")
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        raise InputError(f"{name}: label {labels[wrong][0]} is out of range; there are {classes} classes, from 0")
    return LabelledImages(
        torch.from_numpy(np.require(images, requirements=["C", "W"])), torch.from_numpy(labels.astype(np.int64))
    )
