"""Maximum mean discrepancy: environments whose representations have the same distribution under a kernel."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from concord.errors import InputError
from concord.gradients.risk import Batch
from concord.objectives.environment_vectors import EnvironmentVectors
from concord.objectives.representation import Represented
from concord.space import Entries, LogUniform

_GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
_ROWS = 256  # of the kernel at a time, so that they stay in the processor's cache


class MMD(Represented, EnvironmentVectors):
    """The mean of the risks and λ times the discrepancy of the representations, over max(1, λ).

    The discrepancy of two environments is mean k(x, x') + mean k(y, y') - 2 mean k(x, y) over the representations of
    their examples, k(x, y) = Σ exp(-γ ‖x - y‖²), γ = .001, .01, …, 1000; D is its mean over pairs of environments. Li
    et al., Domain Generalization with Adversarial Feature Learning, 2018; kernel and pairs are DomainBed's
    (Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, 2021). The weight is λ.
    """

    name: ClassVar[str] = "mmd"
    by_example: ClassVar[bool] = True
    default_weight: ClassVar[float | None] = 1.0
    display_name: ClassVar[str | None] = "MMD"
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(0.1, 10.0)}

    def vectors(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The representations of all examples."""
        risks, weights, features, _ = self.represented(model, batch, step)
        self._width = features.shape[2]
        return risks, weights, features.flatten(1)

    def distance(self, vectors: Tensor) -> Tensor:
        """The mean discrepancy over pairs."""
        discrepancy: Tensor = _Discrepancy.apply(  # type: ignore[no-untyped-call]
            vectors.reshape(-1, self._width), len(vectors)
        )
        return discrepancy


class _Discrepancy(torch.autograd.Function):
    """D of the examples ``(environments * examples, width)``; its gradient is computed with it, in rows of the kernel.

    D is Σ c(x, y) k(x, y) over all pairs of examples, with one c within an environment and another between two. PyTorch
    would keep seven matrices of all pairs for the gradient.
    """

    @staticmethod
    def forward(ctx: Any, examples: Tensor, environments: int) -> Tensor:
        number, each = len(examples), len(examples) // environments
        within = 2 / (environments * each**2)
        coefficients = examples.new_tensor([-within / (environments - 1), within])
        of = torch.arange(number, device=examples.device) // each
        squares = examples.square().sum(1)
        value, gradient = examples.new_zeros(()), torch.zeros_like(examples)
        for first in range(0, number, _ROWS):  # and the columns from there on, since the kernel is symmetric
            rows, columns = examples[first : first + _ROWS], examples[first:]
            here = slice(first, first + len(rows))
            distances = (squares[here, None] + squares[first:]).addmm_(rows, columns.T, alpha=-2).clamp_(min=0)
            kernel, slope, term = (torch.zeros_like(distances) for _ in range(3))
            for gamma in _GAMMAS:
                torch.mul(distances, -gamma, out=term).exp_()
                kernel += term
                slope.add_(term, alpha=-2 * gamma)  # the derivative of a distance by x is 2 (x - y)
            weights = coefficients[(of[here, None] == of[first:]).long()]
            weights[:, len(rows) :] *= 2  # the pair (y, x) is not visited
            value += (kernel * weights).sum()
            slope *= weights
            gradient[here] += slope.sum(1, keepdim=True) * rows - slope @ columns
            gradient[first:] += slope.sum(0)[:, None] * columns - slope.T @ rows
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # the gradient is a constant to PyTorch, which would leave out its derivative
            raise InputError("objective mmd: it has no second derivative; backward with create_graph=True is refused")
        (gradient,) = ctx.saved_tensors
        return grads[0] * gradient, None
