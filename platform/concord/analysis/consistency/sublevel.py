"""Inconsistency on a grid in the plane, by flood fill: exact but for the grid, of any losses."""

from collections.abc import Sequence

import numpy as np
import scipy.ndimage
from numpy.typing import ArrayLike, NDArray

from concord.analysis.consistency.quadratic import check_epsilon
from concord.errors import ArgumentError


def connected_region(losses: ArrayLike, start: tuple[int, int], epsilon: float) -> NDArray[np.bool_]:
    """N_e on a grid: the points that a path joins to the start along which |L_e - L_e(start)| ≤ ε.

    Args:
        losses: of one environment at the points of the grid, of shape ``(rows, columns)``.
        start: row and column of θ*.
        epsilon: ε, above 0.

    Returns:
        Whether a point is in the region, of the grid's shape. A path goes along rows and columns.

    Raises:
        ArgumentError: ε is not above 0, or the start is not on the grid or has no finite loss.
    """
    check_epsilon(epsilon)
    grid = np.asarray(losses, dtype=np.float64)
    if grid.ndim != 2 or not all(0 <= place < size for place, size in zip(start, grid.shape, strict=False)):
        raise ArgumentError("start", start, f"is not on the grid of shape {grid.shape}")
    if not np.isfinite(grid[start]):
        raise ArgumentError("start", start, "the loss is not finite there")
    equal = np.abs(grid - grid[start]) <= epsilon
    parts, _ = scipy.ndimage.label(equal)
    region: NDArray[np.bool_] = parts == parts[start]
    return region


def grid_inconsistency(losses: Sequence[ArrayLike], start: tuple[int, int], epsilon: float) -> float:
    """I^ε at a point of a grid (eq. 1).

    Args:
        losses: of each environment on the same grid, of shape ``(rows, columns)``; two at least.
        start: row and column of θ*.
        epsilon: ε, above 0.

    Raises:
        ArgumentError: see :func:`connected_region`; or there are fewer than two environments.
    """
    grids = [np.asarray(each, dtype=np.float64) for each in losses]
    if len(grids) < 2:
        raise ArgumentError("losses", len(grids), "consistency compares two environments at least")
    worst = 0.0
    for own in grids:
        region = connected_region(own, start, epsilon)
        worst = max(worst, *(float(np.abs(other[region] - own[start]).max()) for other in grids))
    return worst
