"""The loss surfaces of the paper's figures: two environments each, whose losses are known in closed form.

The paper defines Fig. 3 and 12, but not Fig. 1, 2 and 11: the surfaces of these are our own, with the shown properties.
"""

from collections.abc import Callable, Sequence

import numpy as np
import scipy.ndimage
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

Array = NDArray[np.float64]

# Both environments have two minima: a shared one, and one where each has its own valley.
SHARED_MINIMUM, SEPARATE_MINIMUM = (-0.5, -0.5), (1.0, 1.0)
PATCHWORK_SOLUTION = (100.0, -45.0, 100.0, -75.0, 1.0, 1.0)
_PLACES, _HEIGHTS = (0.0, 0.4, 0.5, 0.7, 0.8, 1.0), (0.0, 0.0, 1.0, 1.0, 2.0, 2.0)


def two_minima(first: ArrayLike, second: ArrayLike) -> tuple[Array, Array]:
    """The losses of A and B of Fig. 1 and 2 (ours): min(‖θ - m₀‖², (θ₁ - 1)²), and with θ₂ in place of θ₁.

    At m₀ = (-½, -½) both have the same bowl. At (1, 1) A has a valley along θ₂, and B one along θ₁: their average has
    a minimum there, as good as m₀, although neither environment alone has an isolated minimum there.
    """
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    bowl = (x - SHARED_MINIMUM[0]) ** 2 + (y - SHARED_MINIMUM[1]) ** 2
    return np.minimum(bowl, (x - 1) ** 2), np.minimum(bowl, (y - 1) ** 2)


def two_minima_gradients(place: ArrayLike) -> list[Array]:
    """The gradients of A's and B's loss of :func:`two_minima` at places ``(..., 2)``, of that shape each."""
    at = np.asarray(place, dtype=np.float64)
    of_bowl = 2 * (at - SHARED_MINIMUM)
    of_valleys = [2 * (at - 1) * axis for axis in np.eye(2)]
    lower = [(each**2).sum(-1, keepdims=True) < (of_bowl**2).sum(-1, keepdims=True) for each in of_valleys]
    return [np.where(here, valley, of_bowl) for here, valley in zip(lower, of_valleys, strict=True)]


# The gradients that descent follows in the panels of Fig. 1.
DESCENTS: dict[str, Callable[[Array], Array]] = {
    "average": lambda place: np.mean(two_minima_gradients(place), axis=0),
    "A": lambda place: two_minima_gradients(place)[0],
    "B": lambda place: two_minima_gradients(place)[1],
}


def descent_path(name: str, start: ArrayLike, learning_rate: float = 0.1, steps: int = 1000) -> Array:
    """The places of gradient descent by one of :data:`DESCENTS`, ``(steps + 1, 2)``."""
    places = [np.asarray(start, dtype=np.float64)]
    for _ in range(steps):
        places.append(places[-1] - learning_rate * DESCENTS[name](places[-1]))
    return np.stack(places)


def connected_region(losses: ArrayLike, start: tuple[int, int], epsilon: float) -> NDArray[np.bool_]:
    """N_e on a grid: the points joined to the start by rows and columns with |L_e - L_e(start)| ≤ ε."""
    grid = np.asarray(losses, dtype=np.float64)
    parts, _ = scipy.ndimage.label(np.abs(grid - grid[start]) <= epsilon)
    region: NDArray[np.bool_] = parts == parts[start]
    return region


def grid_inconsistency(losses: Sequence[ArrayLike], start: tuple[int, int], epsilon: float) -> float:
    """I^ε at a point of a grid (eq. 1) by flood fill, for any losses ``(rows, columns)``; exact up to the grid."""
    grids = [np.asarray(each, dtype=np.float64) for each in losses]
    regions = [(own[start], connected_region(own, start, epsilon)) for own in grids]
    return max(float(np.abs(other[region] - base).max()) for base, region in regions for other in grids)


def crossed_ellipses(narrow: float) -> tuple[Array, Array]:
    """The Hessians of Fig. 3 (0.05) and Fig. 12 (0.01), which the paper draws as the ellipses θᵀ H⁻¹ θ = 1."""
    return np.diag([narrow, 1.0]), np.diag([1.0, narrow])


def diverging_curvatures(spread: float) -> tuple[Array, Array]:
    """The Hessians of Fig. 11 (ours): diag(1 ± s, 1 ∓ s), whose arithmetic mean is the same for every s in [0, 1)."""
    return np.diag([1 + spread, 1 - spread]), np.diag([1 - spread, 1 + spread])


def patchwork(parameters: ArrayLike, x: Array) -> Array:
    """f(x) = θ₅ σ(θ₁x + θ₂) + θ₆ σ(θ₃x + θ₄), the network of Fig. 10 (eq. 3)."""
    a, b, c, d, e, f = np.asarray(parameters, dtype=np.float64)
    found: Array = e * expit(a * x + b) + f * expit(c * x + d)
    return found


def patchwork_target(x: Array) -> Array:
    """The target of Fig. 10's network on [0, 1]: 0, then 1, then 2, joined by lines."""
    found: Array = np.interp(x, _PLACES, _HEIGHTS)
    return found


def patchwork_losses(parameters: ArrayLike) -> tuple[float, float]:
    """The mean squared errors of A (x < ½) and B (x ≥ ½) of Fig. 10.

    :data:`PATCHWORK_SOLUTION` fits both. A's loss does not depend on θ₆, since its σ is 0 there; B's loss does.
    """
    x = np.linspace(0.0, 1.0, 100_001)
    errors = (patchwork(parameters, x) - patchwork_target(x)) ** 2
    return float(errors[x < 0.5].mean()), float(errors[x >= 0.5].mean())
