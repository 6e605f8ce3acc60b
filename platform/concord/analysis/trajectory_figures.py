"""Trajectories as animations."""

from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from concord.errors import InputError
from concord.storage import disk_errors_in_one_line


def moving_picture(frames: Tensor, path: Path, milliseconds: int = 120, scale: int = 4) -> Path:
    """Write frames as a GIF that repeats after a second, each pixel ``scale`` pixels wide; return the path.

    Frames are ``(length, 1 or 3 channels, height, width)``, uint8 or in [0, 1]; several such, ``(sequences, length,
    ...)``, are side by side.
    """
    if frames.ndim == 5:
        frames = frames.permute(1, 2, 3, 0, 4).flatten(3)
    if frames.ndim != 4 or frames.shape[1] not in (1, 3) or len(frames) == 0:
        raise InputError(f"frames {tuple(frames.shape)}: expected (length, 1 or 3 channels, height, width)")
    large = as_bytes(frames).expand(-1, 3, -1, -1).cpu().numpy().transpose(0, 2, 3, 1).repeat(scale, 1).repeat(scale, 2)
    # One palette for all frames; with a palette for each frame colours flicker.
    sample = Image.fromarray(np.concatenate(list(large[:: max(len(large) // 6, 1)]), 1))
    palette = sample.quantize(64, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    pictures = [Image.fromarray(each).quantize(palette=palette, dither=Image.Dither.NONE) for each in large]
    first, *others = pictures
    durations = [milliseconds] * (len(pictures) - 1) + [1000]
    with disk_errors_in_one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)
    return path


def as_bytes(frames: Tensor) -> Tensor:
    """Numbers in [0, 1] as bytes; bytes are unchanged."""
    return (frames.detach().clamp(0, 1) * 255).round().byte() if frames.is_floating_point() else frames
