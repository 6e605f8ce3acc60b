"""Inconsistency of a network to second order, and the differences of its curvature between environments, by layer.

With each loss replaced by ½ δᵀ G_e δ around θ* (G_e its Gauss-Newton matrix) and δ kept in the ball ‖δ‖ ≤ ρ, the region
N_e lies between two ellipsoids: ½ δᵀ (G_e + γI) δ ≤ ε and ≤ 2ε, with γ = 2ε / ρ². So for one pair of environments::

    ε μ ≤ max over N_e of ½ δᵀ G_e' δ ≤ 2 ε μ,    μ = λ_max((G_e + γI)⁻¹ G_e')

μ is computed from products with G, without forming a matrix: by LOBPCG (Knyazev: Toward the optimal preconditioned
eigensolver, 2001) with a few steps of conjugate gradients for (G_e + γI)⁻¹. Each iterate is a Rayleigh quotient, which
never exceeds μ, of products that are computed anew: the sums of earlier products may be rounding alone. SciPy's LOBPCG
keeps the iterate of the least residual, which may be the first one, since residuals grow before they fall.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import scipy.linalg
import torch
from torch import Tensor

from concord.analysis.consistency.environment_losses import Add, EnvironmentLosses
from concord.analysis.consistency.measurement import Measurement, layer_means

Product = Callable[[Tensor], Tensor]
"""Maps a vector ``(n,)`` to a symmetric positive semidefinite matrix times it."""

_MOST = 100  # iterations of LOBPCG
_INNER, _INNER_TOLERANCE = 8, 1e-2  # iterations of conjugate gradients in each of them, and when they end
_TOLERANCE = 0.003  # of the residual, in the norm of (G_e + γI)⁻¹, over μ; μ's own error is of its square
_SPAN = 1e-12  # of the largest eigenvalue of (G_e + γI) in a span; below it, vectors depend linearly on each other
_SMALLEST_ENTRY = 1e-4  # of the mean of a layer's curvatures, the least that a logarithm is taken of


@dataclass(frozen=True)
class Ratio:
    """The largest ratio of two curvatures, μ, and its direction of norm 1, ``(n,)``.

    If it has not converged, μ may be larger.
    """

    value: float
    direction: Tensor
    converged: bool


def largest_ratio(own: Product, other: Product, damping: float, start: Tensor) -> Ratio:
    """λ_max((G + γI)⁻¹ G') from products with G (own) and G' (other), beginning with the vector ``start``, ``(n,)``.

    γ, the damping, is above 0, or 0 where G is positive definite. The iteration is of two vectors: one alone may stay
    at the second of two close ratios, while the other would still rise above it.
    """

    def damped(vector: Tensor) -> Tensor:
        return own(vector) + damping * vector

    def with_products(vector: Tensor) -> _WithProducts:
        vector = vector / vector.norm()
        return vector, other(vector), damped(vector)

    second = torch.randn(start.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def best(points: Sequence[_WithProducts], directions: Sequence[_WithProducts]) -> tuple[_Points, _Points]:
        vectors, moves = _ritz(points, directions)
        return [with_products(each) for each in vectors], moves

    points, moves = best([with_products(start.double()), with_products(second.to(start.device))], [])
    value, converged = 0.0, False
    for _ in range(_MOST):
        residuals = [_residual(point, damped) for point in points]
        value, error, _ = residuals[0]
        # An eigenvalue is at most the error away from each value, and the first value is to be the largest.
        converged = error <= _TOLERANCE * value and all(v + e <= value * (1 + _TOLERANCE) for v, e, _ in residuals)
        steps = [with_products(step) for _, _, step in residuals if float(step.norm()) > 0]
        if converged or not steps:
            break
        found, moves = best(points, [*steps, *moves])
        if _quotient(found[0]) < value * (1 - _TOLERANCE):  # the sums of products have misled it
            found, moves = best(points, steps)
        if _quotient(found[0]) < value * (1 - _TOLERANCE):
            break
        points = found
    direction = points[0][0].to(start.dtype)
    return Ratio(value, direction, converged or value == 0)


_WithProducts = tuple[Tensor, Tensor, Tensor]
"""A vector x, and with it G'x and (G + γI)x."""
_Points = list[_WithProducts]


def _quotient(point: _WithProducts) -> float:
    x, ax, bx = point
    return float(x @ ax) / float(x @ bx)


def _residual(point: _WithProducts, damped: Product) -> tuple[float, float, Tensor]:
    """A point's ratio, the norm of its residual, and the step that would remove the residual."""
    x, ax, bx = point
    value = _quotient(point)
    residual = ax - value * bx
    step = _solved(damped, residual)
    return value, (max(float(residual @ step), 0.0) / float(x @ bx)) ** 0.5, step


def _ritz(points: Sequence[_WithProducts], directions: Sequence[_WithProducts]) -> tuple[Sequence[Tensor], _Points]:
    """The two vectors with the largest ratios in the span of points and directions; and their parts of directions."""
    parts = [torch.stack(each) for each in zip(*points, *directions, strict=True)]
    lengths = parts[0].norm(dim=1, keepdim=True)
    scaled = [each / lengths for each in parts]
    vectors, *products = scaled
    a, b = ((vectors @ each.T).cpu().numpy() for each in products)
    sizes, axes = scipy.linalg.eigh((b + b.T) / 2)
    independent = sizes > _SPAN * sizes[-1]
    axes = axes[:, independent] / sizes[independent] ** 0.5
    weights = axes @ scipy.linalg.eigh(axes.T @ ((a + a.T) / 2) @ axes)[1][:, :-3:-1]
    by = torch.as_tensor(weights.T.copy(), device=vectors.device)
    n = len(points)
    best = [w @ vectors for w in by]
    moved = [tuple(w[n:] @ each[n:] for each in scaled) for w in by] if directions else []
    return best, moved


def _solved(product: Product, right: Tensor) -> Tensor:
    """A few steps of conjugate gradients towards the x with B x = right, from products with B."""
    x, residual = torch.zeros_like(right), right
    direction, norm = residual, float(residual @ residual)
    enough = norm * _INNER_TOLERANCE**2
    for _ in range(_INNER):
        if norm <= enough:
            break
        moved = product(direction)
        curvature = float(direction @ moved)
        if not curvature > 0:
            break
        length = norm / curvature
        x = x + length * direction
        residual = residual - length * moved
        before, norm = norm, float(residual @ residual)
        direction = residual + (norm / before) * direction
    return x


def pair_ratio(
    losses: EnvironmentLosses, own: str, other: str, epsilon: float, radius: float, start: Tensor | None = None
) -> Ratio:
    """μ of a pair of environments: the quadratic L_e' changes by at most ε μ to 2 ε μ in N_e within the ball.

    ``start`` is a first direction, such as another ε's; None draws one, the same at each call.
    """
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
    """The diagonal ``(n,)`` of each environment's G_e by Hutchinson's estimate, mean of v ⊙ G_e v with random signs v.

    All environments have the same v, so environments with the same examples have the same estimate. The error is
    proportional to 1 / √probes, with ``probes`` the number of v; an estimate may be negative.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.zeros(losses.size, dtype=losses.dtype, device=losses.device) for name in losses.names}
    for _ in range(probes):
        signs = (2 * torch.randint(0, 2, (losses.size,), generator=generator) - 1).to(losses.device, losses.dtype)
        for name in losses.names:
            found[name] += signs * losses.product(name, signs) / probes
    return found


def log_ratios(
    losses: EnvironmentLosses,
    curvatures: Mapping[str, Tensor],
    add: Add = lambda values: values,
    environments: int | None = None,
) -> list[Measurement]:
    """``log_ratio``: the mean over components of log(arithmetic / geometric mean of the environments' curvatures).

    It is the logarithm of proposition 3's ratio for each component: 0 if all environments have the same curvature, and
    independent of the losses' scale. Entries below a small part of the layer's mean are raised to that part.

    Args:
        losses: the network's losses in the environments of this process.
        curvatures: one for each environment, ``(n,)``, see :func:`diagonals`.
        add: adds a tensor over the processes.
        environments: the number of environments of all processes; None takes this process's number.
    """
    d = environments or len(curvatures)
    zeros = torch.zeros(losses.size, dtype=torch.float64, device=losses.device)
    total = add(sum((values.clamp(min=0) for values in curvatures.values()), zeros))
    least = torch.cat([part.mean().expand(len(part)) for part in losses.by_layer(total).values()]) / d * _SMALLEST_ENTRY
    sums = add(sum((torch.maximum(values.double(), least) for values in curvatures.values()), zeros))
    logs = add(sum((torch.maximum(values.double(), least).log() for values in curvatures.values()), zeros))
    ratios = torch.where(least > 0, (sums / d).log() - logs / d, 0.0)
    return layer_means("log_ratio", ratios, losses.by_layer(ratios))
