"""Trajectories of images in a folder: the first frame and what changes from frame to frame, read one at a time.

A folder has shards, safetensors files of some trajectories each, and a manifest that names task, settings, lengths,
labels and checksums. A trajectory depends on its key (seed, split, number) alone: not on the shard that it is in, nor
on the process that made it. Reading one takes the memory of that one, whatever the size of the data: shards are mapped.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from concord.errors import InputError, first_line
from concord.storage import local
from concord.storage.data_folder import MANIFEST, checksum, file_checksum, manifest_of, unfit

FORMAT = 1
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_SHORTEST = 2  # frames: there is nothing to predict in one


@dataclass(frozen=True)
class Trajectory:
    """What happens, from beginning to end.

    Attributes:
        frames: ``(length, channels, height, width)`` uint8.
        label: the class of what happens.
        rejected: how many tries before this one did not come to an end in time.
    """

    frames: npt.NDArray[np.uint8]
    label: int
    rejected: int = 0


class TrajectoryTask(Protocol):
    """Where trajectories come from, and what can be read in them."""

    @property
    def name(self) -> str:
        """Of the task."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels."""
        ...

    @property
    def frame(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""
        ...

    @property
    def folder(self) -> str:
        """The name of the folder that its data are in, unless another is given."""
        ...

    @property
    def command(self) -> str:
        """What makes its data."""
        ...

    def trajectory(self, key: Sequence[int]) -> Trajectory:
        """The trajectory of this key: the same wherever and whenever it is asked for."""
        ...

    def read_label(self, frames: Tensor, first: Tensor | None = None) -> Tensor:
        """The share of each class in frames: ``(..., length, *frame)`` uint8 or in [0, 1] to ``(..., classes)``.

        The shares sum to 1. ``first``, ``(..., *frame)``, is the frame that the trajectory begins with; the first
        of the frames if None.
        """
        ...


@dataclass(frozen=True)
class Changes:
    """A trajectory as it is kept.

    Attributes:
        first: ``(channels, height, width)`` uint8.
        counts: ``(length - 1,)`` uint32, how many pixels change at each frame after the first.
        places: ``(sum of counts,)`` uint16 (uint32 in frames of more pixels than that), which they are, row by row.
        values: ``(sum of counts, channels)`` uint8, what they become.
        label: its class.
        rejected: tries before it.
    """

    first: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.uint32]
    places: npt.NDArray[np.unsignedinteger[Any]]
    values: npt.NDArray[np.uint8]
    label: int
    rejected: int

    @property
    def length(self) -> int:
        """Frames."""
        return len(self.counts) + 1

    @property
    def digest(self) -> str:
        """Another for another trajectory."""
        parts = (self.first, self.counts, self.places, self.values)
        shape = json.dumps([*self.first.shape, self.length, self.label]).encode()
        return hashlib.sha256(b"".join([shape, *(part.tobytes() for part in parts)])).hexdigest()[:24]


def changes(trajectory: Trajectory) -> Changes:
    """The form in which a trajectory is kept.

    Raises:
        InputError: the frames are not uint8, not ``(length, channels, height, width)``, or fewer than two.
    """
    frames = trajectory.frames
    if frames.dtype != np.uint8 or frames.ndim != 4:
        found = f"{frames.dtype} {frames.shape}"
        raise InputError(f"frames must be uint8 (length, channels, height, width); these are {found}")
    if len(frames) < _SHORTEST:
        raise InputError(f"a trajectory has at least {_SHORTEST} frames; this one has {len(frames)}")
    pixels = frames.reshape(*frames.shape[:2], -1)
    differ = pixels[1:, 0] != pixels[:-1, 0]
    for channel in range(1, pixels.shape[1]):
        differ |= pixels[1:, channel] != pixels[:-1, channel]
    frame, places = np.divmod(np.flatnonzero(differ), pixels.shape[2])
    return Changes(
        first=frames[0].copy(),
        counts=np.bincount(frame, minlength=len(differ)).astype(np.uint32),
        places=places.astype(np.uint16 if pixels.shape[2] <= 1 << 16 else np.uint32),
        values=pixels[1:][frame, :, places],
        label=trajectory.label,
        rejected=trajectory.rejected,
    )


def restored(kept: Changes) -> npt.NDArray[np.uint8]:
    """The frames, ``(length, channels, height, width)`` uint8.

    Raises:
        ValueError, IndexError: the parts do not belong together.
    """
    pixels = np.empty((kept.length, kept.first.shape[0], kept.first[0].size), np.uint8)
    pixels[0] = kept.first.reshape(pixels.shape[1:])
    ends = kept.counts.cumsum(dtype=np.int64)
    if not len(kept.places) == len(kept.values) == (ends[-1] if len(ends) else 0):
        raise ValueError("its changed pixels are not as many as it says")
    for frame in range(1, kept.length):
        pixels[frame] = pixels[frame - 1]
        changed = slice(ends[frame - 1] - kept.counts[frame - 1], ends[frame - 1])
        pixels[frame][:, kept.places[changed]] = kept.values[changed].T
    return pixels.reshape(kept.length, *kept.first.shape)


def shard_of(trajectories: Sequence[Changes]) -> bytes:
    """The content of a file with these trajectories.

    Raises:
        InputError: there are none, or their frames differ in shape.
    """
    if not trajectories:
        raise InputError("a shard needs at least one trajectory; this one is empty")
    shapes = {each.first.shape for each in trajectories}
    if len(shapes) > 1:
        raise InputError(f"the frames of a shard have one shape; these have {sorted(shapes)}")
    steps = [0, *(len(each.counts) for each in trajectories)]
    pixels = [0, *(len(each.places) for each in trajectories)]
    content: bytes = safetensors.numpy.save(
        {
            "first": np.stack([each.first for each in trajectories]),
            "counts": np.concatenate([each.counts for each in trajectories]),
            "places": np.concatenate([each.places for each in trajectories]),
            "values": np.concatenate([each.values for each in trajectories]),
            "labels": np.array([each.label for each in trajectories], np.int64),
            "rejected": np.array([each.rejected for each in trajectories], np.int64),
            "step_starts": np.cumsum(steps, dtype=np.int64),
            "pixel_starts": np.cumsum(pixels, dtype=np.int64),
        }
    )
    return content


class Shard:
    """One file of trajectories, mapped into memory: what is not read is not loaded.

    Args:
        path: the file.

    Raises:
        InputError: it cannot be read, or is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any
        try:
            self._file = safetensors.safe_open(path, framework="numpy")
            self._steps, self._pixels, self._labels, self._rejected = (
                self._file.get_tensor(name) for name in ("step_starts", "pixel_starts", "labels", "rejected")
            )
        except (OSError, safetensors.SafetensorError, ValueError) as error:
            raise self._damaged(error) from error

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[Changes]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Changes:
        if not 0 <= row < len(self):
            raise IndexError(row)
        try:
            steps = slice(int(self._steps[row]), int(self._steps[row + 1]))
            pixels = slice(int(self._pixels[row]), int(self._pixels[row + 1]))
            return Changes(
                first=self._file.get_slice("first")[row : row + 1][0],
                counts=self._part("counts", steps),
                places=self._part("places", pixels),
                values=self._part("values", pixels),
                label=int(self._labels[row]),
                rejected=int(self._rejected[row]),
            )
        except (OSError, safetensors.SafetensorError, ValueError, IndexError) as error:
            raise self._damaged(error) from error

    def frames(self, row: int) -> npt.NDArray[np.uint8]:
        """Those of one trajectory (InputError: it is damaged)."""
        try:
            return restored(self[row])
        except (ValueError, IndexError) as error:
            raise error if isinstance(error, InputError) else self._damaged(error) from error

    def _part(self, name: str, part: slice) -> npt.NDArray[Any]:
        whole = self._file.get_slice(name)
        if part.start == part.stop:  # of which safetensors makes no slice
            shape = (0, *whole.get_shape()[1:])
            return np.empty(shape, {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32}[whole.get_dtype()])
        found: npt.NDArray[Any] = whole[part]
        return found

    def _damaged(self, error: Exception) -> InputError:
        return InputError(f"--data-dir: {self._path} is damaged ({first_line(error)}); remove it, and make it again")


def described_shard(path: Path) -> dict[str, Any]:
    """What a manifest says of the content of a shard.

    Raises:
        InputError: it cannot be read.
    """
    kept = list(Shard(path))
    return {
        "lengths": [each.length for each in kept],
        "labels": [each.label for each in kept],
        "rejected": [each.rejected for each in kept],
        "digests": [each.digest for each in kept],
        "sha256": file_checksum(path),
    }


_PER_TRAJECTORY = ("lengths", "labels", "rejected", "digests")


class TrajectoryFolder:
    """Trajectories as they lie in a folder; shards are opened, and checked, when they are asked for.

    Args:
        folder: where they are, or their address.
        task: the name of the task that they are of.
        command: what makes them, for messages; None: ``concord data`` and the task.

    Attributes:
        manifest: what is written of them.
        task, classes, frame: of the data, see :class:`TrajectoryTask`.
        settings: of the task.
        version: of the data: another when any trajectory is another; not when the shards are cut otherwise.

    Raises:
        InputError: there are none, or they are of another task, or the manifest is not one of this format, or a file is
            missing, or one trajectory is there twice.
    """

    def __init__(self, folder: Path, task: str, command: str | None = None) -> None:
        self.folder = folder
        command = self._command = command or f"concord data {task}"
        self.manifest, names = manifest_of(folder, "trajectories", command)
        if missing := _missing(self.manifest):
            raise unfit(folder, f"its {MANIFEST} is not complete ({missing} is missing)")
        if self.manifest["format"] != FORMAT:
            raise unfit(folder, f"its {MANIFEST} has format {self.manifest['format']}; this Concord reads {FORMAT}")
        if self.manifest["data"] != task:
            raise unfit(folder, f"trajectories of {self.manifest['data']}, not of {task}; {command} makes those")
        check_distinct(self.manifest["shards"], folder)
        for shard in self.manifest["shards"]:
            if shard["file"] not in names:
                raise unfit(folder, f"{shard['file']} is missing; {command} makes it")
        self.task, self.classes = task, tuple(self.manifest["classes"])
        self.frame: tuple[int, int, int] = tuple(self.manifest["frame"])
        self.settings: Mapping[str, Any] = self.manifest["settings"]
        said = {split: [digest for shard in self._shards(split) for digest in shard["digests"]] for split in SPLITS}
        self.version = checksum(json.dumps([task, self.settings, said], sort_keys=True).encode())[:12]

    def split(self, split: Split) -> "Trajectories":
        """The trajectories of a split.

        Raises:
            InputError: there are none.
        """
        if not self.has(split):
            raise unfit(self.folder, f"no trajectories for {split}; {self._command} makes them in a new folder")
        return Trajectories(self.folder, self._shards(split), self.frame)

    def unfit(self, why: str) -> InputError:
        """The refusal of these data."""
        return unfit(self.folder, why)

    def has(self, split: Split) -> bool:
        """Whether there are trajectories for that."""
        return bool(self._shards(split))

    def _shards(self, split: Split) -> list[dict[str, Any]]:
        return [shard for shard in self.manifest["shards"] if shard["split"] == split]


class Trajectories(Dataset[tuple[Tensor, Tensor]]):
    """The trajectories of one split: ``dataset[i]`` is ``(frames, label)``.

    Frames are ``(length, channels, height, width)`` uint8, the label an int64 scalar. Lengths vary. Only what is asked
    for is in memory; a file's checksum is compared when it is opened first.

    Args:
        folder: of the data.
        shards: what the manifest says of the files.
        frame: ``(channels, height, width)`` of the frames.

    Attributes:
        lengths: ``(trajectories,)`` int64.
        labels: ``(trajectories,)`` int64.
        digests: of each trajectory, in hexadecimal digits.
    """

    def __init__(self, folder: Path, shards: Sequence[Mapping[str, Any]], frame: tuple[int, int, int]) -> None:
        self._folder, self._shards, self._frame = folder, list(shards), tuple(frame)
        self.lengths = torch.tensor([n for shard in shards for n in shard["lengths"]])
        self.labels = torch.tensor([n for shard in shards for n in shard["labels"]])
        self.digests = [digest for shard in shards for digest in shard["digests"]]
        self._starts = np.cumsum([0, *(len(shard["lengths"]) for shard in shards)])
        self._opened: dict[int, Shard] = {}
        self._opening = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} trajectories, and no number {index}")
        index %= len(self)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        frames = self._shard(number).frames(index - int(self._starts[number]))
        if frames.shape != (int(self.lengths[index]), *self._frame):
            said = f"frames {frames.shape} where the manifest says {(int(self.lengths[index]), *self._frame)}"
            raise unfit(self._folder, f"{self._shards[number]['file']} holds {said}; remove it, and make it again")
        return torch.from_numpy(frames), self.labels[index]

    def __getstate__(self) -> dict[str, Any]:  # for the workers of a data loader, which map the files themselves
        return {key: value for key, value in self.__dict__.items() if key not in ("_opened", "_opening")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opened={}, _opening=threading.Lock())

    def _shard(self, number: int) -> Shard:
        with self._opening:
            if number not in self._opened:
                said = self._shards[number]
                path = local(self._folder / said["file"])
                if file_checksum(path) != said["sha256"]:
                    raise unfit(self._folder, f"{said['file']} is corrupt; remove it, and concord data makes it anew")
                self._opened[number] = Shard(path)
            return self._opened[number]


def check_distinct(shards: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """See that no trajectory is there twice: then none is in two splits (InputError)."""
    seen: dict[str, str] = {}
    for shard in shards:
        for digest in shard["digests"]:
            if digest in seen:
                raise unfit(folder, f"one trajectory is in {seen[digest]} and in {shard['file']}")
            seen[digest] = shard["file"]


def _missing(manifest: Mapping[str, Any]) -> str | None:
    """What a manifest lacks."""
    whole: tuple[tuple[str, type[Any]], ...] = (
        ("format", int), ("data", str), ("classes", list), ("frame", list), ("settings", dict), ("shards", list),
    )  # fmt: skip
    for key, kind in whole:
        if not isinstance(manifest.get(key), kind):
            return key
    for shard in manifest["shards"]:
        for key, kind in (("file", str), ("split", str), ("sha256", str), *((key, list) for key in _PER_TRAJECTORY)):
            if not (isinstance(shard, dict) and isinstance(shard.get(key), kind) and shard[key] != []):
                return f"{key} of a file"
        if len({len(shard[key]) for key in _PER_TRAJECTORY}) > 1:
            return "a number of a trajectory"
    if not any(shard["split"] == "train" for shard in manifest["shards"]):
        return "a file for train"
    return None
