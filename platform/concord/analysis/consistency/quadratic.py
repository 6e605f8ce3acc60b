"""Inconsistency of quadratic losses with a common minimum of zero loss: exact, by generalized eigenvalues.

With L_e(θ) = ½ (θ - θ*)ᵀ H_e (θ - θ*), N_e is the ellipsoid in which L_e ≤ ε, and the most that L_e' reaches in it is
ε · λ_max(H_e⁻¹ H_e'). So I^ε(θ*) = ε · max over (e, e') of λ_max(H_e⁻¹ H_e'), which is ε at least (e = e').
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike

from concord.analysis.consistency.spd_means import spd_matrices
from concord.errors import ArgumentError


def quadratic_inconsistency(hessians: Sequence[ArrayLike], epsilon: float) -> float:
    """I^ε at the common minimum of quadratic losses, exactly.

    Args:
        hessians: H_e of each environment, symmetric and positive definite, of shape ``(n, n)``; two at least.
        epsilon: ε, above 0.

    Raises:
        ArgumentError: ε is not above 0, there are fewer than two environments, or a Hessian is not as it has to be.
    """
    check_epsilon(epsilon)
    found = spd_matrices(hessians, "hessians")
    if len(found) < 2:
        raise ArgumentError("hessians", len(found), "consistency compares two environments at least")
    pairs = itertools.permutations(found, 2)
    return epsilon * max(1.0, *(float(scipy.linalg.eigh(other, own, eigvals_only=True)[-1]) for own, other in pairs))


def inconsistency_bound(first: ArrayLike, second: ArrayLike, epsilon: float) -> float:
    """4ε · (det H₊ / det H_∧)², which I^ε of two quadratic losses never exceeds (proposition 3, corrected).

    The paper has the constant 2, which H = (10), (1) contradicts: there I^ε is 10ε and its bound 6.05ε. What its proof
    gives is 4, for any two symmetric positive definite matrices and not only for diagonal ones, since both sides follow
    from their generalized eigenvalues; 4 is the least such constant.

    Raises:
        ArgumentError: ε is not above 0, or a matrix is not symmetric and positive definite.
    """
    check_epsilon(epsilon)
    a, b = spd_matrices([first, second], "hessians")
    # det H_∧ is the geometric mean of the determinants; both as logarithms, which large matrices need.
    log_ratio = np.linalg.slogdet((a + b) / 2)[1] - (np.linalg.slogdet(a)[1] + np.linalg.slogdet(b)[1]) / 2
    return 4 * epsilon * math.exp(2 * float(log_ratio))


def check_epsilon(epsilon: float) -> None:
    """Refuse an ε that is not a number above 0 (ArgumentError)."""
    if not 0 < epsilon < math.inf:
        raise ArgumentError("epsilon", epsilon, "must be a number above 0")
