"""Rules that weigh the environments by the inner products of their gradients: Gram matrix, weights, weighted sum.

With the gradients g_e of d environments, G_ef = ⟨g_e, g_f⟩ is a sum over components, so each process sums
its part, and the parts are added. A rule maps G to d weights, and the update is Σ w_e g_e. The rule's own work does not
grow with the model. Two rules as instances:

* clipping: w_e = min(1, c / √G_ee) / d.
* Krum: w is 1 for the environment with the smallest sum of G_ee + G_ff - 2 G_ef over its nearest neighbours, else 0.

A new rule is a frozen dataclass with ``weights(gram)``.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, SupportsInt, runtime_checkable

import torch
from torch import Tensor

from concord.aggregation.asynchronous import is_asynchronous
from concord.aggregation.draws import with_draws
from concord.errors import InputError

# Components that are converted at once, and those of a matrix product: several threads share the products, and rounding
# in float32 stays within one. On a GPU starting an operation takes longer than a small one, so that blocks are larger:
# the products of one take 256 MiB, or are those of a million components.
_BLOCK, _GPU_BLOCK, _GPU_PRODUCTS, _PRODUCT = 1 << 16, 1 << 20, 1 << 26, 1 << 13
_FEW_ROWS = 512


@runtime_checkable
class Weighting(Protocol):
    """A rule that needs the inner products of whole gradients.

    A rule that draws at random has ``draws``, names under which ``weights`` gets uniform numbers in [0, 1), ``(d, d)``,
    as further arguments, and ``seed``; see :mod:`concord.aggregation.draws`.
    """

    @property
    def weights(self) -> Callable[..., Tensor]:
        """The method ``weights(gram)``: the environments' weights ``(d,)`` of a Gram matrix, float64 on the CPU."""
        ...


@dataclass(frozen=True)
class GramFunction:
    """A module that maps a Gram matrix to weights, such as TorchJD's ``UPGradWeighting``, as a rule."""

    wrapped: Any

    def weights(self, gram: Tensor) -> Tensor:
        """The module's weights."""
        weights: Tensor = self.wrapped(gram)
        return weights


def gram_of(rows: Tensor, some: slice = slice(None)) -> Tensor:
    """The inner products of these rows, or of some of them with all; float64 on the CPU.

    Products are formed in float32, or float64 where these overflow, and added in float64.
    """
    for dtype in (torch.promote_types(rows.dtype, torch.float32), torch.float64):
        result = products_of(rows, dtype, some).cpu()
        if bool(torch.isfinite(result).all()):
            break
    return result


def products_of(rows: Tensor, dtype: torch.dtype, some: slice = slice(None)) -> Tensor:
    """The inner products of some of these rows with all, on their device: formed in this dtype, added in float64."""
    components = rows.shape[1]
    product = _PRODUCT if len(rows) <= _FEW_ROWS else _BLOCK
    block = max(product * (_GPU_PRODUCTS // len(rows) ** 2), _GPU_BLOCK) if is_asynchronous(rows.device) else _BLOCK
    whole = components - components % product
    total = torch.zeros(len(rows[some]), len(rows), dtype=torch.float64, device=rows.device)
    for start, stop in itertools.pairwise([*range(0, whole, block), whole, components]):
        pieces = max(1, (stop - start) // product)
        shape = pieces, (stop - start) // pieces
        parts = rows[:, start:stop].to(dtype).unflatten(1, shape).transpose(0, 1)
        total += torch.bmm(parts[:, some], parts.mT).sum(0, dtype=torch.float64)
    return total


def weights_of(rule: Weighting, gram: Tensor, step: SupportsInt = 0) -> Tensor:
    """The weights that a rule gives the environments of a Gram matrix, ``(d,)``, float64.

    Args:
        rule: the rule.
        gram: the inner products of their gradients, ``(d, d)``.
        step: the step's number, for a rule that draws at random.

    Raises:
        InputError: the rule gives another number of weights, or weights that are not finite.
    """
    gram = gram.detach().to("cpu", torch.float64)
    count = len(gram)
    drawn = with_draws(rule, {}, step, lambda: torch.arange(count * count, device="cpu").view(count, count))
    weights = rule.weights(gram, **drawn)
    name = name_of(rule)
    if not isinstance(weights, Tensor) or weights.shape != (count,):
        found = f"shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise InputError(f"rule {name}: gives weights of {found} for {count} environments; expected ({count},)")
    weights = weights.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(weights).all()):
        norms = ", ".join(f"{float(norm):.3g}" for norm in gram.diagonal().sqrt())
        raise InputError(f"rule {name}: gives weights that are not finite at step {int(step)}, for norms {norms}")
    return weights


def name_of(rule: Any) -> str:
    """The name of a rule in messages."""
    return type(getattr(rule, "wrapped", rule)).__name__
