"""Environments from a folder of images, ``DOMAIN/CLASS/IMAGE``, read a batch at a time."""

import contextlib
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from concord.environments.collection import Environments
from concord.environments.data_files import data_files, missing
from concord.environments.datasets import Transform, from_dataset
from concord.environments.images import IMAGE_ENDINGS, plain_image, require_8_bits
from concord.environments.purposes import purposes_of
from concord.errors import ArgumentError, InputError, InputWarning, first_line
from concord.storage import display_path, local

_NAMED = 3  # of images that cannot be read
_END_OF_JPEG, _TAIL = b"\xff\xd9", 1024
_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # as Pillow says it


class ImageFolder:
    """The images of a folder: a map-style dataset of Pillow's images, each with the number of its class.

    Args:
        folder: of the images.
        names: of the files in the folder, ``DOMAIN/CLASS/IMAGE``.
        classes: the classes' names in order.
    """

    draws = False  # random numbers

    def __init__(self, folder: Path, names: Sequence[str], classes: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        self.folder = folder
        # Not Python's objects: counting references to them would copy their memory in every reading process.
        self.files = np.array([os.fsencode(name) for name in names])
        self.labels = np.array([numbers[name.split("/")[1]] for name in names])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        path = f"{self.folder}/{os.fsdecode(self.files[place])}"
        try:
            with Image.open(path) as image:
                image.load()
                return plain_image(image, "RGB"), int(self.labels[place])
        except _UNREADABLE as error:
            raise InputError(f"{path}: cannot be read as an image ({first_line(error)}); remove it") from error


def from_image_folder(
    folder: str | Path,
    *,
    size: int | None = None,
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    augment: Transform | None = None,
    skip_unreadable: bool = False,
) -> Environments:
    """Environments from a folder with ``DOMAIN/CLASS/IMAGE``: an environment for each domain.

    Inputs are uint8 ``(3, height, width)``, targets the numbers of the classes. Images are read a batch at a time. At
    the start every file is checked without decoding it, where its format allows that. A warning counts the other files,
    which are left out; of hidden ones only images are counted.

    Args:
        folder: the folder, or its address.
        size: resize images to this height and width; None: all have one size.
        validation, test: names of these domains; all others train.
        augment: of an image of Pillow in training, before it is resized; see ``train_transform`` of
            :func:`~concord.environments.from_dataset`.
        skip_unreadable: leave out images that cannot be read, with a warning.

    Raises:
        InputError: the folder does not fit, or images cannot be read.
    """
    given = Path(folder)
    shown, folder = display_path(given), local(given)
    names = data_files(
        folder,
        IMAGE_ENDINGS,
        option="data",
        shown=shown,
        place="DOMAIN/CLASS/IMAGE",
        nothing="no image is at DOMAIN/CLASS/IMAGE",
        one_each=False,
    )
    if names is None:
        raise missing(given, "folder")
    by_domain = _classes(names)
    train = purposes_of(by_domain, validation, test, options=True)["train"]
    if len(train) < 2:
        expected = "two training domains are needed, as DOMAIN/CLASS/IMAGE"
        raise ArgumentError("data", shown, f"{expected}; found {', '.join(train) or 'none'}")
    names, version = _readable(shown, folder, names, skip_unreadable)
    classes = _shared_classes(shown, _classes(names), train)
    images = ImageFolder(folder, names, classes)
    domains = from_dataset(
        images,
        [name.split("/")[0] for name in names],
        targets=images.labels,
        validation=validation,
        test=test,
        transform=_Resized(size, None),
        train_transform=_Resized(size, augment),
    )
    environments = Environments(lambda name: domains[name].source, **domains.by_purpose(), version=version)
    environments.classes = classes
    return environments


def _classes(names: Sequence[str]) -> dict[str, set[str]]:
    """The classes of each domain, in order."""
    found: dict[str, set[str]] = {}
    for domain, name, _ in (each.split("/") for each in names):
        found.setdefault(domain, set()).add(name)
    return found


def _shared_classes(shown: str, by_domain: Mapping[str, set[str]], train: Sequence[str]) -> tuple[str, ...]:
    """The classes of the training domains; a warning names those that a domain lacks."""
    classes = tuple(sorted(set[str]().union(*(by_domain.get(domain, ()) for domain in train))))
    if len(classes) < 2:
        raise ArgumentError("data", shown, f"two classes are needed; found {', '.join(classes) or 'none'}")
    for domain, own in by_domain.items():
        if strange := sorted(own - set(classes)):
            raise ArgumentError("data", shown, f"no training domain has class {strange[0]} of domain {domain}")
    if lacking := [
        f"{domain} lacks {', '.join(sorted(set(classes) - own))}"
        for domain, own in by_domain.items()
        if set(classes) - own
    ]:
        warnings.warn(f"{shown}: not every domain has all classes: {'; '.join(lacking)}", InputWarning, stacklevel=3)
    return classes


def _readable(shown: str, folder: Path, names: Sequence[str], skip: bool) -> tuple[list[str], str]:
    """The files that can be read, and a digest of their names and sizes."""
    with ThreadPoolExecutor() as threads:
        checked = list(zip(names, threads.map(lambda name: _size_or_problem(folder / name), names), strict=True))
    if bad := [f"{name} ({problem})" for name, problem in checked if isinstance(problem, str)]:
        named = ", ".join(bad[:_NAMED]) + (", …" if len(bad) > _NAMED else "")
        problem = f"{len(bad)} of {len(names)} images cannot be read: {named}"
        if not skip:
            raise ArgumentError("data", shown, f"{problem}; remove them, or give skip_unreadable")
        warnings.warn(f"{shown}: {problem}; left out", InputWarning, stacklevel=3)
    readable = [(name, size) for name, size in checked if isinstance(size, int)]
    return [name for name, _ in readable], hashlib.sha256(repr(readable).encode()).hexdigest()[:16]


def longest_side(folder: Path) -> int | None:
    """The longest side of the first image at each ``DOMAIN/CLASS``, from its header; None if no image can be read."""
    sides = []
    for images in local(folder).glob("*/*"):
        endings = tuple(IMAGE_ENDINGS)
        first = min((each for each in images.glob("[!.]*") if each.name.lower().endswith(endings)), default=None)
        with contextlib.suppress(*_UNREADABLE):
            if first is not None:
                with Image.open(first) as image:
                    sides.append(max(image.size))
    return max(sides, default=None)


def _size_or_problem(path: Path) -> int | str:
    """The size of the file, or why Pillow cannot read the image. Complete PNG and JPEG files are not decoded."""
    try:
        with Image.open(path) as image:
            complete = False
            require_8_bits(image)
            if image.format == "PNG":
                image.verify()  # checksums
                complete = True
            elif image.format == "JPEG":
                with path.open("rb") as file:
                    file.seek(-min(_TAIL, path.stat().st_size), os.SEEK_END)
                    complete = _END_OF_JPEG in file.read()
            if not complete:
                image.load()
        return path.stat().st_size
    except _UNREADABLE as error:
        return first_line(error).replace(str(path), path.name)


@dataclass(frozen=True)
class _Resized:
    """Prepares an image for its batch."""

    size: int | None
    augment: Transform | None

    @property
    def draws(self) -> bool:
        return self.augment is not None

    def __call__(self, example: tuple[Image.Image, int]) -> tuple[Any, int]:
        image, label = example
        image = image if self.augment is None else self.augment(image)
        if self.size is not None and image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return image, label
