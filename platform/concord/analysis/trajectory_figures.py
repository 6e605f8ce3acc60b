"""Trajectories to look at: some frames side by side, and an animation."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from concord.errors import InputError

Frames = npt.NDArray[np.uint8]
_GAP = 2  # pixels between frames


def strip(frames: Frames, count: int, scale: int = 2) -> Image.Image:
    """So many frames, evenly spread from the first to the last, side by side.

    Args:
        frames: ``(length, 3, height, width)`` uint8.
        count: how many.
        scale: pixels of the picture for one of the frames.
    """
    chosen = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
    padded = np.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, _GAP)), constant_values=255)
    row = padded.transpose(2, 0, 3, 1).reshape(frames.shape[2], -1, 3)[:, :-_GAP]
    return Image.fromarray(row.repeat(scale, 0).repeat(scale, 1))


def animate(frames: Frames, path: Path, scale: int = 3, milliseconds: int = 80) -> None:
    """Write an animated GIF that begins anew after a second.

    Args:
        frames: ``(length, 3, height, width)`` uint8.
        path: of the file.
        scale: pixels of the picture for one of the frames.
        milliseconds: a frame.
    """
    large = frames.transpose(0, 2, 3, 1).repeat(scale, 1).repeat(scale, 2)
    # One palette for all: else each frame has colours of its own, and flickers.
    sample = Image.fromarray(np.concatenate(list(large[:: max(len(large) // 6, 1)]), 1))
    palette = sample.quantize(64, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    pictures = [Image.fromarray(each).quantize(palette=palette, dither=Image.Dither.NONE) for each in large]
    first, *others = pictures
    durations = [milliseconds] * (len(pictures) - 1) + [1000]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


def moving_picture(frames: Tensor, path: Path, milliseconds: int = 120, scale: int = 4) -> Path:
    """Write frames as a GIF that repeats, making the folder; returns the path.

    Args:
        frames: ``(length, channels, height, width)``, uint8 or in [0, 1], of 1 or 3 channels; several such, side by
            side, ``(sequences, length, ...)``.
        path: of the file.
        milliseconds: of a frame.
        scale: pixels for each pixel.

    Raises:
        InputError: the frames are of another form.
    """
    if frames.ndim == 5:
        frames = frames.permute(1, 2, 3, 0, 4).flatten(3)
    if frames.ndim != 4 or frames.shape[1] not in (1, 3) or len(frames) == 0:
        raise InputError(f"frames {tuple(frames.shape)}: expected (length, 1 or 3 channels, height, width)")
    path.parent.mkdir(parents=True, exist_ok=True)
    coloured = as_bytes(frames).expand(-1, 3, -1, -1).cpu().numpy()
    animate(coloured, path, scale, milliseconds)
    return path


def as_bytes(frames: Tensor) -> Tensor:
    """Numbers in [0, 1] as bytes; bytes as they are."""
    return (frames.detach().clamp(0, 1) * 255).round().byte() if frames.is_floating_point() else frames
