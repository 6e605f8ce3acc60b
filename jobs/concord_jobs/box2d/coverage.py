"""The coverage of pixels by shapes, for pictures with smooth edges without a graphics library."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
SCANLINES = 8  # in a pixel's height, for shapes without an exact extent in closed form


def overlap(low: npt.ArrayLike, high: npt.ArrayLike, first: npt.ArrayLike, count: int) -> Floats:
    """The fraction of each of ``count`` pixels from ``first`` on that [low, high] covers: ``(..., count)``."""
    low, high, first = (np.asarray(each, np.float32)[..., None] for each in (low, high, first))
    left = first + np.arange(count, dtype=np.float32)
    covered: Floats = np.clip(np.minimum(high, left + 1) - np.maximum(low, left), 0, 1)
    return covered


def covered_box(box: tuple[float, float, float, float], height: int, width: int) -> tuple[slice, slice, Floats]:
    """The pixels of a picture that a rectangle (left, top, right, bottom) touches, and the covered fraction of each.

    The rectangle must overlap the picture; its part outside is left out.
    """
    left, top, right, bottom = box
    rows = slice(max(int(np.floor(top)), 0), min(int(np.ceil(bottom)), height))
    columns = slice(max(int(np.floor(left)), 0), min(int(np.ceil(right)), width))
    down = overlap(top, bottom, rows.start, rows.stop - rows.start)
    return rows, columns, down[:, None] * overlap(left, right, columns.start, columns.stop - columns.start)


def scanlines(first: npt.ArrayLike, count: int) -> Floats:
    """The heights of the scanlines of ``count`` rows of pixels from ``first`` on: ``(..., count * SCANLINES)``."""
    offsets = (np.arange(count * SCANLINES, dtype=np.float32) + 0.5) / SCANLINES
    heights: Floats = np.asarray(first, np.float32)[..., None] + offsets
    return heights


def covered(left: Floats, right: Floats, first: npt.ArrayLike, count: int) -> Floats:
    """Coverage ``(..., rows, count)`` by a shape with the extent [left, right] at each scanline; 0 if it is empty.

    ``left`` and ``right`` are ``(..., rows * SCANLINES)``, ``first`` is the column of the first pixel, ``(...)``.
    """
    lines = overlap(left, right, np.asarray(first)[..., None], count)
    rows = lines.reshape(*left.shape[:-1], left.shape[-1] // SCANLINES, SCANLINES, count)
    mean: Floats = rows.mean(-2)
    return mean


def block_means(pixels: Floats, block: int) -> Floats:
    """The means over blocks of ``block`` × ``block`` pixels, of ``(..., rows, columns)``."""
    *leading, rows, columns = pixels.shape
    lines = pixels.reshape(*leading, rows // block, block, columns)
    down = lines[..., 0, :].copy()  # adding slices is faster than a reduction over a short axis
    for line in range(1, block):
        down += lines[..., line, :]
    cells = down.reshape(*leading, rows // block, columns // block, block)
    across = cells[..., 0].copy()
    for cell in range(1, block):
        across += cells[..., cell]
    means: Floats = across / block**2
    return means


def to_bytes(pixels: Floats) -> npt.NDArray[np.uint8]:
    """Round [0, 1] to bytes, 0 … 255."""
    nearest: npt.NDArray[np.uint8] = np.rint(pixels * 255).astype(np.uint8)
    return nearest
