"""Small quadratic programs over nonnegative vectors, solved exactly."""

import torch
from torch import Tensor

# Elements of the systems that are solved at once: 128 MiB, where those of 512 problems with 512 unknowns have 1 GiB.
_AT_ONCE = 1 << 24


def nonnegative_minimum(quadratic: Tensor, linear: Tensor) -> Tensor:
    """The x ≥ 0 ``(problems, d)`` that minimize xᵀQx / 2 + cᵀx, for several c ``(problems, d)`` at once.

    Q ``(d, d)`` is positive definite, float64. By block principal pivoting (Kim and Park: Fast nonnegative matrix
    factorization, 2011, algorithm 2). x is solved on a set of variables, and all that violate a condition change sides.
    If that does not reduce their number three times in a row, only the last of them changes (Murty's rule), which
    terminates.
    """
    problems, size = linear.shape
    eye = torch.eye(size, dtype=linear.dtype, device=linear.device)
    free = torch.zeros_like(linear, dtype=torch.bool)  # the others are 0
    fewest, chances = (torch.full((problems,), most, device=linear.device) for most in (size + 1, 3))
    tolerance = 1e-11 * linear.abs().amax(1, keepdim=True)
    solution = torch.zeros_like(linear)
    for _ in range(100 * size):
        gradient = solution @ quadratic + linear
        wrong = torch.where(free, solution < 0, gradient < -tolerance)
        count = wrong.sum(1)
        unsolved = count.nonzero().flatten()
        if not len(unsolved):
            break
        fewer = count < fewest
        chances = torch.where(fewer, 3, chances - 1)
        fewest = torch.minimum(fewest, count)
        if bool((chances <= 0).any()):
            last = size - 1 - wrong.flip(1).to(torch.int8).argmax(1)
            wrong &= (chances > 0)[:, None] | (torch.arange(size, device=last.device) == last[:, None])
        free ^= wrong
        for part in unsolved.split(max(1, _AT_ONCE // size**2)):
            sides = free[part]
            system = torch.where(sides[:, :, None] & sides[:, None, :], quadratic, eye)
            solution[part] = torch.linalg.solve(system, torch.where(sides, -linear[part], 0))
    return solution.clamp_(min=0)


def minimum_norm(gram: Tensor) -> Tensor:
    """The weights w ≥ 0 with Σ w = 1 of the point of least norm among Σ w_e g_e, from the Gram matrix of the g_e.

    It is the x ≥ 0 that minimizes ‖R x‖² + (1ᵀx - 1)², divided by its sum, where RᵀR = G (Lawson and Hanson: Solving
    least squares problems, 1974, chapter 23). Equal or dependent gradients have no unique weights; any of them will do.
    """
    from scipy.optimize import nnls  # here, since every worker imports this module and few need SciPy

    scale = gram.diagonal().mean()
    if scale <= 0:
        return gram.new_full((len(gram),), 1 / len(gram))
    # Products in float32 make a matrix of dependent gradients that has negative eigenvalues.
    values, vectors = torch.linalg.eigh(gram / scale)
    rows = torch.cat([(vectors * values.clamp(min=0).sqrt()).mT, gram.new_ones(1, len(gram))])
    aim = [0.0] * len(gram) + [1.0]
    # Norms that differ much take more than SciPy's 3 iterations a variable.
    solution = torch.from_numpy(nnls(rows.numpy(), aim, maxiter=100 * len(gram))[0])
    return solution / solution.sum()
