"""Sequences of frames as the examples of an environment: padded to one length, each with a key of its own."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concord.dynamics.matching import CrossEntropy, FrameLoss
from concord.errors import InputError

_NUMBERS = 1 << 32


def sequences(
    environment: str,
    frames: Sequence[Any] | Any,
    lengths: Any = None,
    longest: int | None = None,
    *,
    bounded: bool = True,
    **more: Any,
) -> dict[str, Tensor]:
    """The examples of an environment of sequences, a tree of tensors.

    Args:
        environment: the environment's name; the keys depend on it.
        frames: of each sequence ``(length, channels, height, width)``, or with frames of any other shape, the same
            for all: a list of arrays, or one array ``(sequences, longest, ...)``. Bytes stand for 0 to 1; floating
            point values must lie in [0, 1] if ``bounded``.
        lengths: the numbers of valid frames, if ``frames`` is one padded array; None takes all frames.
        longest: pad to this number of frames, the same for all environments; None pads to the longest sequence.
        bounded: False for states of any range, with :class:`SquaredError` or a loss of your own in place of
            :class:`CrossEntropy`.
        more: further arrays with a row for each sequence, such as ``label``.

    Returns:
        ``frames`` ``(sequences, longest, ...)`` uint8 or float32, ``length`` and ``key`` ``(sequences,)`` int64, and
        the further arrays.

    Raises:
        InputError: no sequence is given, one has fewer than 2 frames, frames differ in shape or type, values lie
            outside of [0, 1] or are not finite, or a further array has another number of rows.
    """
    parts = [_tensor(environment, each) for each in frames]
    if not parts:
        raise InputError(f"environment {environment}: it is empty; each environment needs at least one sequence")
    given = [len(part) for part in parts] if lengths is None else [int(each) for each in lengths]
    if len(given) != len(parts):
        raise InputError(f"environment {environment}: {len(given)} lengths of {len(parts)} sequences")
    for number, (part, length) in enumerate(zip(parts, given, strict=True)):
        _check(environment, number, part, length, parts[0], bounded)
    needed = max(given)
    if longest is not None and longest < needed:
        raise InputError(f"environment {environment}: longest={longest}, but it has a sequence of {needed} frames")
    longest = longest or needed
    padded = parts[0].new_zeros(len(parts), longest, *parts[0].shape[1:])
    for row, part, length in zip(padded, parts, given, strict=True):
        row[:length] = part[:length]
    own = {"frames": padded, "length": torch.tensor(given), "key": keys(environment, len(parts))}
    others = {name: torch.as_tensor(np.asarray(values)) for name, values in more.items()}
    for name, values in others.items():
        if values.shape[:1] != (len(parts),):
            raise InputError(f"environment {environment}: {name} {tuple(values.shape)} of {len(parts)} sequences")
    return own | others


def keys(environment: str, count: int) -> Tensor:
    """Keys that identify sequences in any process, int64 ``(count,)``; their random draws depend on the keys."""
    return (zlib.crc32(environment.encode()) >> 1) * _NUMBERS + torch.arange(count)


def number_of(key: int) -> int:
    """The number of a sequence in its environment, from 0."""
    return key % _NUMBERS


def parts_of(batch: Mapping[str, Tensor], loss: FrameLoss | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Frames, lengths and keys of a batch of :func:`sequences`, checked for a loss (None: :class:`CrossEntropy`)."""
    missing = [name for name in ("frames", "length", "key") if not isinstance(batch, Mapping) or name not in batch]
    if missing:
        raise InputError(f"batch: has no {', '.join(missing)}; make the examples with concord.dynamics.sequences")
    frames, lengths = batch["frames"], batch["length"]
    if frames.is_floating_point():
        valid = torch.arange(frames.shape[1], device=frames.device) < lengths.to(frames.device)[:, None]
        if wrong := _wrong(frames[valid], bounded=loss is None or isinstance(loss, CrossEntropy)):
            raise InputError(f"batch: frames hold values {wrong}")
    return frames, lengths, batch["key"]


def _wrong(frames: Tensor, bounded: bool) -> str | None:
    """The problem with values of floating point, if there is one."""
    if bounded:
        return None if bool(((frames >= 0) & (frames <= 1)).all()) else "outside of [0, 1]"
    return None if bool(torch.isfinite(frames).all()) else "that are not finite"


def _tensor(environment: str, values: Any) -> Tensor:
    floating = isinstance(values, Tensor) and values.is_floating_point()
    array = values.detach().cpu().float().numpy() if floating else np.asarray(values)
    if array.dtype != np.uint8 and array.dtype.kind not in "bf":
        raise InputError(f"environment {environment}: frames of type {array.dtype}; expected uint8, or float in [0, 1]")
    if array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array))
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.float32)))


def _check(environment: str, number: int, part: Tensor, length: int, first: Tensor, bounded: bool) -> None:
    where = f"environment {environment}, sequence {number}"
    if part.ndim < 2 or not 2 <= length <= len(part):
        raise InputError(f"{where}: {length} frames of an array {tuple(part.shape)}; it needs at least 2")
    if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
        found, expected = ((tuple(each.shape[1:]), str(each.dtype).removeprefix("torch.")) for each in (part, first))
        raise InputError(f"{where}: a frame is {found[0]} {found[1]}, but {expected[0]} {expected[1]} in sequence 0")
    if part.is_floating_point() and (wrong := _wrong(part[:length], bounded)):
        raise InputError(f"{where}: its frames hold values {wrong}")
