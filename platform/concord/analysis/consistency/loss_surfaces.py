"""The loss surfaces of the paper's figures: two environments each, whose losses are known in closed form.

Fig. 3 and 12 are given in the paper. Fig. 1, 2 and 11 are not: those here are ours, with what the figures show.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# Two minima of both environments: one that they share, and one where each has a valley of its own.
SHARED_MINIMUM, SEPARATE_MINIMUM = (-0.5, -0.5), (1.0, 1.0)


def two_minima(first: ArrayLike, second: ArrayLike) -> tuple[Array, Array]:
    """The losses of A and B of Fig. 1 and 2 (ours): min(‖θ - m₀‖², (θ₁ - 1)²), and with θ₂ in place of θ₁.

    At m₀ = (-½, -½) both have the same bowl. At (1, 1) A has a valley along θ₂, and B one along θ₁: their average has a
    minimum there as good as m₀, which no environment alone would call one point.

    Args:
        first, second: θ₁ and θ₂, of one shape.

    Returns:
        The losses of A and of B, of that shape.
    """
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    bowl = (x - SHARED_MINIMUM[0]) ** 2 + (y - SHARED_MINIMUM[1]) ** 2
    return np.minimum(bowl, (x - 1) ** 2), np.minimum(bowl, (y - 1) ** 2)


def two_minima_gradients(place: ArrayLike) -> tuple[Array, Array]:
    """The gradients of A's and B's loss of :func:`two_minima` at places ``(..., 2)``, of that shape each."""
    at = np.asarray(place, dtype=np.float64)
    of_bowl = 2 * (at - SHARED_MINIMUM)
    bowl = (of_bowl**2).sum(-1, keepdims=True) / 4
    found = []
    for axis in range(2):
        of_valley = 2 * (at - 1) * np.eye(2)[axis]
        found.append(np.where((of_valley**2).sum(-1, keepdims=True) / 4 < bowl, of_valley, of_bowl))
    return found[0], found[1]


def crossed_ellipses(narrow: float) -> tuple[Array, Array]:
    """The Hessians of Fig. 3 (0.05) and Fig. 12 (0.01), which the paper draws as the ellipses θᵀ H⁻¹ θ = 1.

    Args:
        narrow: the squared half-axis that is not 1.
    """
    return np.diag([narrow, 1.0]), np.diag([1.0, narrow])


def diverging_curvatures(spread: float) -> tuple[Array, Array]:
    """The Hessians of Fig. 11 (ours): diag(1 ± s, 1 ∓ s), whose arithmetic mean is the same for every s in [0, 1)."""
    return np.diag([1 + spread, 1 - spread]), np.diag([1 - spread, 1 + spread])


# Fig. 10: a function of three steps, of which A sees the first half of the interval and B the second.
PATCHWORK_SOLUTION = (100.0, -45.0, 100.0, -75.0, 1.0, 1.0)
_PLACES, _HEIGHTS = (0.0, 0.4, 0.5, 0.7, 0.8, 1.0), (0.0, 0.0, 1.0, 1.0, 2.0, 2.0)


def patchwork(parameters: ArrayLike, x: ArrayLike) -> Array:
    """f(x) = θ₅ σ(θ₁x + θ₂) + θ₆ σ(θ₃x + θ₄), the network of Fig. 10 (eq. 3)."""
    a, b, c, d, e, f = np.asarray(parameters, dtype=np.float64)
    at = np.asarray(x, dtype=np.float64)
    found: Array = e * _sigmoid(a * at + b) + f * _sigmoid(c * at + d)
    return found


def patchwork_target(x: ArrayLike) -> Array:
    """What it is to be on [0, 1]: 0, then 1, then 2, joined by lines."""
    found: Array = np.interp(np.asarray(x, dtype=np.float64), _PLACES, _HEIGHTS)
    return found


def patchwork_losses(parameters: ArrayLike, points: int = 100_001) -> tuple[float, float]:
    """The mean squared errors of A (x < ½) and B (x ≥ ½) of Fig. 10.

    :data:`PATCHWORK_SOLUTION` fits both. A cannot tell θ₆ from anything else, since its σ is 0 there, and B needs it.

    Args:
        parameters: θ₁ to θ₆.
        points: of [0, 1] on which the errors are taken.
    """
    x = np.linspace(0.0, 1.0, points)
    errors = (patchwork(parameters, x) - patchwork_target(x)) ** 2
    return float(errors[x < 0.5].mean()), float(errors[x >= 0.5].mean())


def descent_path(
    gradient: Callable[[Array], Array], start: ArrayLike, learning_rate: float = 0.1, steps: int = 1000
) -> Array:
    """The places of gradient descent, ``(steps + 1, *start.shape)``."""
    places = [np.asarray(start, dtype=np.float64)]
    for _ in range(steps):
        places.append(places[-1] - learning_rate * gradient(places[-1]))
    return np.stack(places)


def descended(
    gradient: Callable[[Array], Array], start: ArrayLike, learning_rate: float = 0.1, steps: int = 1000
) -> Array:
    """Where gradient descent ends."""
    found: Array = descent_path(gradient, start, learning_rate, steps)[-1]
    return found


def _sigmoid(values: Array) -> Array:
    found: Array = 0.5 * (1 + np.tanh(values / 2))
    return found
