"""Quadratic losses with a common minimum: the means of their Hessians, and their exact inconsistency.

The average of the losses has the arithmetic mean of their Hessians. A loss surface of the environments' agreement has
their geometric mean, which is smaller where they disagree (AND-mask paper, §2.2 and appendix A.2).

With L_e(θ) = ½ (θ - θ*)ᵀ H_e (θ - θ*), N_e is the ellipsoid with L_e ≤ ε, and the maximum of L_e' in N_e is
ε · λ_max(H_e⁻¹ H_e'). So I^ε(θ*) = ε · max over (e, e') of λ_max(H_e⁻¹ H_e'), which is at least ε (e = e'). All
matrices are symmetric and positive definite.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]


def arithmetic_mean(matrices: Sequence[ArrayLike]) -> Matrix:
    """H₊ = Σ H_e / d, the Hessian of the average of the losses."""
    mean: Matrix = np.mean(np.asarray(matrices, dtype=np.float64), axis=0)
    return mean


def geometric_mean(pair: Sequence[ArrayLike]) -> Matrix:
    """H_∧ of two, A^½ (A^-½ B A^-½)^½ A^½: the Karcher mean, where log(A⁻¹ H_∧) + log(B⁻¹ H_∧) = 0."""
    a, b = (np.asarray(each, dtype=np.float64) for each in pair)
    root, inverse_root = _of_eigenvalues(a, np.sqrt), _of_eigenvalues(a, lambda values: values**-0.5)
    mean: Matrix = root @ _of_eigenvalues(inverse_root @ b @ inverse_root, np.sqrt) @ root
    return mean


def inconsistency(hessians: Sequence[ArrayLike], epsilon: float = 1.0) -> float:
    """I^ε at the common minimum of quadratic losses, exactly."""
    pairs = itertools.permutations(hessians, 2)
    return epsilon * max(1.0, *(float(scipy.linalg.eigh(other, own, eigvals_only=True)[-1]) for own, other in pairs))


def inconsistency_bound(pair: Sequence[ArrayLike], epsilon: float = 1.0) -> float:
    """4ε · (det H₊ / det H_∧)², which I^ε of two quadratic losses never exceeds (proposition 3, corrected).

    The paper has the constant 2, which H = (10), (1) contradicts: here I^ε is 10ε and the paper's bound 6.05ε. The
    paper's proof gives 4, for any two symmetric positive definite matrices and not only for diagonal ones, since both
    sides follow from the generalized eigenvalues. No smaller constant holds.
    """
    # det H_∧ is the geometric mean of the determinants; large matrices need logarithms.
    log_mean, *logs = (np.linalg.slogdet(np.asarray(each))[1] for each in (arithmetic_mean(pair), *pair))
    return 4 * epsilon * math.exp(2 * (log_mean - sum(logs) / 2))


def _of_eigenvalues(matrix: Matrix, function: Callable[[Matrix], Matrix]) -> Matrix:
    """The matrix with this function of its eigenvalues."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    found: Matrix = (vectors * function(values)) @ vectors.T
    return found
