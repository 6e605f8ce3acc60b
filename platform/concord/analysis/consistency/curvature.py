"""Inconsistency of a network to second order, and how its curvature differs between environments, layer by layer.

With each loss replaced by ½ δᵀ G_e δ around θ* (G_e its Gauss-Newton matrix) and δ kept in the ball ‖δ‖ ≤ ρ, the region
N_e lies between two ellipsoids: ½ δᵀ (G_e + γI) δ ≤ ε and ≤ 2ε, with γ = 2ε / ρ². So for one pair of environments::

    ε μ ≤ max over N_e of ½ δᵀ G_e' δ ≤ 2 ε μ,    μ = λ_max((G_e + γI)⁻¹ G_e')

μ is found from products with G alone, no matrix is formed: LOBPCG (Knyazev: Toward the optimal preconditioned
eigensolver, 2001) with a few steps of conjugate gradients for (G_e + γI)⁻¹. What it has found at any time is a Rayleigh
quotient, which never exceeds μ.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg, lobpcg
from torch import Tensor

from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.analysis.consistency.quadratic import check_epsilon
from concord.errors import ArgumentError

Product = Callable[[Tensor], Tensor]
"""Maps a vector ``(n,)`` to a symmetric positive semidefinite matrix times it."""

_FIRST, _MOST = 4, 60  # iterations of LOBPCG: until the size of μ is known, and then until it is found
_INNER, _INNER_TOLERANCE = 12, 1e-2  # iterations of conjugate gradients in each of them, and when they end
_TOLERANCE = 0.02  # of the residual, in the norm of (G_e + γI)⁻¹, over μ; μ's own error is of its square
_SMALLEST_ENTRY = 1e-4  # of the mean of a layer's curvatures, the least that a logarithm is taken of


@dataclass(frozen=True)
class Ratio:
    """The largest ratio of two curvatures.

    Attributes:
        value: μ.
        direction: where it is reached, of norm 1, ``(n,)``.
        converged: whether the residual is as small as it is to be; otherwise μ may be larger.
    """

    value: float
    direction: Tensor
    converged: bool


def largest_ratio(own: Product, other: Product, damping: float, start: Tensor) -> Ratio:
    """λ_max((G + γI)⁻¹ G') from products.

    Args:
        own, other: products with G and G'.
        damping: γ, above 0, or 0 where G is positive definite.
        start: a vector to begin with, ``(n,)``; its dtype is that of the products.

    Raises:
        ArgumentError: γ is negative.
    """
    if not damping >= 0:
        raise ArgumentError("damping", damping, "must not be negative")
    size = len(start)

    def as_operator(product: Product) -> LinearOperator:
        def apply(vector: NDArray[np.float64]) -> NDArray[np.float64]:
            given = torch.as_tensor(vector.reshape(-1), dtype=start.dtype, device=start.device)
            found: NDArray[np.float64] = product(given).double().cpu().numpy()
            return found

        return LinearOperator((size, size), matvec=apply, dtype=np.float64)

    a, b = as_operator(other), as_operator(lambda vector: own(vector) + damping * vector)
    inverse = LinearOperator(
        (size, size),
        matvec=lambda vector: cg(b, vector, rtol=_INNER_TOLERANCE, maxiter=_INNER)[0],
        dtype=np.float64,
    )
    block = start.double().cpu().numpy().reshape(-1, 1)
    value, tolerance = 0.0, np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it stopped at its last iteration, which is said by us
        for iterations in (_FIRST, _MOST):
            values, block = lobpcg(a, block, B=b, M=inverse, tol=tolerance, maxiter=iterations, largest=True)
            value = float(values[0])
            # ‖r‖ in the norm of (G + γI)⁻¹ is at most ‖r‖ / √γ.
            tolerance = _TOLERANCE * value * max(damping, 1e-12) ** 0.5
    residual = a @ block[:, 0] - value * (b @ block[:, 0])
    in_norm = float(np.sqrt(max(residual @ (inverse @ residual), 0.0)))
    direction = torch.as_tensor(block[:, 0] / np.linalg.norm(block[:, 0]), dtype=start.dtype, device=start.device)
    return Ratio(value, direction, in_norm <= _TOLERANCE * max(value, 1e-12))


def pair_ratio(
    losses: EnvironmentLosses, own: str, other: str, epsilon: float, radius: float, start: Tensor | None = None
) -> Ratio:
    """μ of a pair of environments: ε μ to 2 ε μ is the most that the quadratic L_e' changes in N_e within the ball.

    Args:
        losses: of the network.
        own, other: e and e'.
        epsilon: ε, above 0.
        radius: ρ, above 0, in units of θ.
        start: a direction to begin with, such as another ε's; None draws one, the same each time.

    Raises:
        ArgumentError: ε or ρ is not above 0.
        InputError: the job's risk has no Gauss-Newton matrix.
    """
    check_epsilon(epsilon)
    check_radius(radius)
    if start is None:
        drawn = torch.randn(losses.size, generator=torch.Generator().manual_seed(0))
        start = drawn.to(losses.device, losses.dtype)
    return largest_ratio(
        lambda vector: losses.product(own, vector),
        lambda vector: losses.product(other, vector),
        2 * epsilon / radius**2,
        start,
    )


def diagonals(losses: EnvironmentLosses, probes: int, seed: int) -> dict[str, Tensor]:
    """The diagonal of each environment's G_e by Hutchinson's estimate, mean of v ⊙ G_e v with random signs v.

    All environments have the same v, so that those with the same examples have the same estimate.

    Args:
        losses: of the network.
        probes: how many v; the estimate's error falls as one over its square root.
        seed: of the signs.

    Returns:
        ``(n,)`` for each environment's name; an estimate may be negative.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.zeros(losses.size, dtype=torch.float64, device=losses.device) for name in losses.names}
    for _ in range(probes):
        signs = (2 * torch.randint(0, 2, (losses.size,), generator=generator) - 1).to(losses.device, losses.dtype)
        for name in losses.names:
            found[name] += (signs * losses.product(name, signs)).double() / probes
    return found


def log_ratios(losses: EnvironmentLosses, curvatures: Mapping[str, Tensor]) -> dict[str, float]:
    """By layer, the mean over its components of log(arithmetic / geometric mean of the environments' curvatures).

    It is 0 where all environments have the same curvature in every component, adds up over components, and does not
    change with the scale of the losses: the logarithm of proposition 3's ratio, for each component. Entries below a
    small part of the layer's mean count as that much.

    Args:
        losses: of the network.
        curvatures: of each environment, ``(n,)``, see :func:`diagonals`.
    """
    stacked = [losses.by_layer(values) for values in curvatures.values()]
    return {name: _log_ratio([values[name] for values in stacked]) for name in losses.layout.names}


def _log_ratio(curvatures: Sequence[Tensor]) -> float:
    values = torch.stack(list(curvatures)).double()
    mean = values.clamp(min=0).mean()
    if mean <= 0:  # a layer that no loss depends on
        return 0.0
    values = values.clamp(min=float(mean) * _SMALLEST_ENTRY)
    return float((values.mean(0).log() - values.log().mean(0)).mean())


def check_radius(radius: float) -> None:
    """Refuse a ρ that is not a number above 0 (ArgumentError)."""
    if not 0 < radius < float("inf"):
        raise ArgumentError("radius", radius, "must be a number above 0")
