"""Means of symmetric positive definite matrices: what averages of losses and of gradients have for a Hessian.

The average of the environments' losses has the arithmetic mean of their Hessians. A loss surface that goes by what they
agree on has their geometric mean, which is smaller where they disagree (AND-mask paper, §2.2 and appendix A.2).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from concord.errors import ArgumentError

Matrix = NDArray[np.float64]
_SYMMETRIC = 1e-10  # of the largest entry, the most by which a matrix may differ from its transpose


def spd_matrices(matrices: Sequence[ArrayLike], name: str = "matrices") -> list[Matrix]:
    """The matrices as float64.

    Args:
        matrices: of shape ``(n, n)`` each, one at least.
        name: what an error calls them.

    Raises:
        ArgumentError: there is none, their shapes differ, or one is not symmetric and positive definite.
    """
    found = [np.asarray(each, dtype=np.float64) for each in matrices]
    if not found:
        raise ArgumentError(name, (), "there has to be at least one")
    for place, each in enumerate(found):
        if each.ndim != 2 or each.shape != (found[0].shape[0],) * 2 or not each.size:
            raise ArgumentError(name, each.shape, "square matrices of one size are needed")
        if not np.isfinite(each).all() or np.abs(each - each.T).max() > _SYMMETRIC * np.abs(each).max():
            raise ArgumentError(name, f"matrix {place}", "is not symmetric")
        least = float(np.linalg.eigvalsh(each)[0])
        if least <= 0:
            raise ArgumentError(
                name, f"matrix {place}", f"is not positive definite: its least eigenvalue is {least:.3g}"
            )
    return found


def arithmetic_mean(matrices: Sequence[ArrayLike]) -> Matrix:
    """H₊ = Σ H_e / d: of the average of the losses."""
    mean: Matrix = np.mean(spd_matrices(matrices), axis=0)
    return mean


def harmonic_mean(matrices: Sequence[ArrayLike]) -> Matrix:
    """(Σ H_e⁻¹ / d)⁻¹, the least of the three in Loewner's order."""
    inverse: Matrix = np.linalg.inv(arithmetic_mean([np.linalg.inv(each) for each in spd_matrices(matrices)]))
    return inverse


def geometric_mean(first: ArrayLike, second: ArrayLike) -> Matrix:
    """A # B = A^½ (A^-½ B A^-½)^½ A^½, the solution G of G A⁻¹ G = B."""
    a, b = spd_matrices([first, second])
    root, inverse_root = _of_eigenvalues(a, np.sqrt), _of_eigenvalues(a, lambda values: values**-0.5)
    return _symmetric(root @ _of_eigenvalues(_symmetric(inverse_root @ b @ inverse_root), np.sqrt) @ root)


def karcher_mean(matrices: Sequence[ArrayLike], tolerance: float = 1e-9, steps: int = 1000) -> Matrix:
    """H_∧, the geometric mean of any number: the X with Σ log(X^-½ H_e X^-½) = 0.

    Of two it is :func:`geometric_mean`, of diagonal ones the geometric mean of each entry. Found by steps along the
    Riemannian gradient, of the length that fits their condition numbers (Bini and Iannazzo: Computing the Karcher mean
    of symmetric positive definite matrices, 2013).

    Args:
        matrices: symmetric and positive definite, of shape ``(n, n)`` each.
        tolerance: the largest norm of that sum, over √n and the number of matrices.
        steps: after so many it ends.

    Raises:
        ArgumentError: a matrix is not symmetric and positive definite, or the tolerance is not reached.
    """
    found = spd_matrices(matrices)
    mean = arithmetic_mean(found)
    for _ in range(steps):
        root, inverse_root = _of_eigenvalues(mean, np.sqrt), _of_eigenvalues(mean, lambda values: values**-0.5)
        seen = [_symmetric(inverse_root @ each @ inverse_root) for each in found]
        gradient = np.sum([_of_eigenvalues(each, np.log) for each in seen], axis=0)
        if np.linalg.norm(gradient) <= tolerance * len(found) * np.sqrt(len(mean)):
            return mean
        # The squared distance to a matrix of condition number c curves by 1 to s coth s, where s = ½ log c.
        spreads = [0.5 * np.log(np.divide(*np.linalg.eigvalsh(each)[[-1, 0]])) for each in seen]
        largest = sum(spread / np.tanh(spread) if spread > 1e-8 else 1.0 for spread in spreads)
        step = 2 / (len(found) + largest)
        mean = _symmetric(root @ _of_eigenvalues(step * gradient, np.exp) @ root)
    raise ArgumentError("tolerance", tolerance, f"the Karcher mean has not come so close in {steps} steps")


def _of_eigenvalues(matrix: Matrix, function: Callable[[Matrix], Matrix]) -> Matrix:
    """The matrix with this function of its eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    found: Matrix = (vectors * function(values)) @ vectors.T
    return found


def _symmetric(matrix: Matrix) -> Matrix:
    half: Matrix = (matrix + matrix.T) / 2
    return half
