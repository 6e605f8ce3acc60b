"""Trajectories to look at: some frames side by side, and an animation."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

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
