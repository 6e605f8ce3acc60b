"""The agreement of signs that the masks share, and the rescaling of a masked update."""

import math

import torch
from torch import Tensor

from concord.errors import ArgumentError


def check_threshold(threshold: float) -> None:
    """Refuse an agreement threshold τ outside [0, 1] (ArgumentError)."""
    if not 0.0 <= threshold <= 1.0:
        raise ArgumentError("threshold", threshold, "the agreement threshold must lie in [0, 1]")


def required_agreement(threshold: float, environments: int, dtype: torch.dtype = torch.float32) -> float:
    """The smallest number of this dtype that is at least τd, for threshold τ and d environments.

    τd is meant as a decimal: ``0.55 · 20`` is a little more than 11 in floating point, yet 11 environments are enough.
    """
    wanted = max(threshold - 1e-9, 0.0) * environments
    if dtype == torch.float64:
        return wanted
    # In Python's own arithmetic, which a compiler can follow: a multiple of float32's last bit.
    bits = 24 - math.frexp(wanted)[1]
    return math.ldexp(math.ceil(math.ldexp(wanted, bits)), -bits)


def kept_where_signs_agree(sign_sum: Tensor, threshold: float, environments: int) -> Tensor:
    """The AND-mask: 1 where |Σ sign g| ≥ τd, else 0 (learning explanations that are hard to vary, §2.3).

    Args:
        sign_sum: Σ sign g over the environments, or an average of signs over time with one environment.
        threshold: τ in [0, 1].
        environments: d.

    Returns:
        0 or 1, shaped and typed as ``sign_sum``. A component that is zero in an environment counts for neither
        sign there.
    """
    # In place, so that 0 and 1 stay numbers: a comparison that gives booleans takes four times as long on a CPU.
    return sign_sum.abs().ge_(required_agreement(threshold, environments, sign_sum.dtype))


def rescaling_factor(kept_fraction: Tensor) -> Tensor:
    """The factor of a layer of which ``kept_fraction`` was kept (appendix B.3.1).

    1e-10 is added to the fraction, as in the paper's published code, so a layer of which nothing was kept stays 0.
    """
    return 1.0 / (kept_fraction + 1e-10)
