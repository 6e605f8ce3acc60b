"""Mixup between environments: weighted means of examples from two environments."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError
from concord.gradients.risk import Batch, Loss, Risk, Supervised, pair
from concord.objectives.objective import Objective, require_several
from concord.space import Entries, LogUniform


class Mixup(Objective):
    """The mean of the risks of mixed examples, μ loss(f(x), y_a) + (1 - μ) loss(f(x), y_b), x = μ x_a + (1 - μ) x_b.

    At each step the environments form a random circle. Each environment a is mixed with its successor b; each pair
    draws its share μ from Beta(α, α). Zhang et al., mixup: Beyond Empirical Risk Minimization, 2018, between
    environments as in DomainBed (Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, 2021). Inputs are
    floating point or bytes, targets classes. Of a table network's codes each mixed example has that of
    x_a with probability μ, and else that of x_b.

    Args:
        loss: the loss of outputs and classes.
        alpha: α of mixup: the shares of two mixed examples are drawn from Beta(α, α).
        autocast: the dtype in which layers compute.

    Raises:
        InputError: α is not above 0, or a risk is given in place of a loss.
    """

    others: ClassVar[bool] = True
    option_names: ClassVar[Mapping[str, str]] = {"alpha": "mixup_alpha"}
    space: ClassVar[Entries] = {"mixup_alpha": LogUniform(0.1, 10.0)}

    def __init__(self, loss: Loss | Risk, alpha: float = 0.2, autocast: torch.dtype | None = None) -> None:
        super().__init__(loss, autocast)
        if not alpha > 0:
            raise ArgumentError("mixup_alpha", alpha, "must be above 0")
        if not isinstance(self.risk, Supervised):
            raise ArgumentError("objective", "mixup", "mixes inputs and classes; it takes a loss of them, not a risk")
        self.risk = Supervised(_of_mixed(self.risk.loss))
        self.alpha = alpha
        self._seed: int | None = None
        self._codes: slice | None = None

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Take the columns of codes, if the model is a table network."""
        super().begin(model, environments, steps)
        codes = getattr(model, "codes", None)
        self._codes = codes if isinstance(codes, slice) else None

    def prepare(self, model: nn.Module, step: int, own: Sequence[int], total: Callable[[Tensor], Tensor]) -> None:
        """Draw a seed in the first process, for all processes."""
        drawn = torch.randint(2**31, ()).to(next(model.parameters()).device)
        self._seed = int(total(drawn * (own[0] == 0)))

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The risks of mixed examples.

        Raises:
            InputError: targets are not classes, or inputs cannot be averaged.
        """
        inputs, classes = pair(batch)
        dtypes = {leaf.dtype for leaf in pytree.tree_leaves(inputs)}
        if classes.is_floating_point() or not all(each.is_floating_point or each == torch.uint8 for each in dtypes):
            given = ", ".join(map(str, (*dtypes, classes.dtype)))
            expected = f"takes floating-point or byte inputs and classes (integers) as targets; these are {given}"
            raise ArgumentError("objective", "mixup", expected)
        require_several(len(classes), "mixup")
        seed, self._seed = self._seed, None
        draws = random.Random(int(torch.randint(2**31, ())) if seed is None else seed)
        circle = draws.sample(range(len(classes)), len(classes))
        after = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
        shares = [draws.betavariate(self.alpha, self.alpha) for _ in circle]
        choices = {each: draws.getrandbits(32) for each in circle}
        pairs = [(each, after[each]) for each in (own if own is not None else range(len(classes)))]

        def mixed(leaf: Tensor) -> Tensor:
            result = leaf.new_empty((len(pairs), *leaf.shape[1:]))
            for place, (one, other) in zip(result, pairs, strict=True):
                if leaf.is_floating_point():
                    torch.lerp(leaf[other], leaf[one], shares[one], out=place)
                else:
                    place.copy_(torch.lerp(leaf[other].float(), leaf[one].float(), shares[one]).round())
                if self._codes is not None:
                    first, second = (leaf[each][:, self._codes] for each in (one, other))
                    drawn = torch.rand(first.shape, generator=torch.Generator().manual_seed(choices[one]))
                    place[:, self._codes] = torch.where((drawn < shares[one]).to(leaf.device), first, second)
            return result

        firsts, seconds = (torch.stack([classes[each] for each in side]) for side in zip(*pairs, strict=True))
        of_first = torch.tensor([shares[one] for one, _ in pairs], dtype=torch.float64, device=classes.device)
        targets = firsts, seconds, of_first[:, None].expand(firsts.shape[:2])
        return self.risks(model, (pytree.tree_map(mixed, inputs), targets), step)


def _of_mixed(loss: Loss) -> Loss:
    """The loss, also of classes ``(first, second, share of the first)``."""

    def of_mixed(outputs: Tensor, targets: Any) -> Tensor:
        if isinstance(targets, Tensor):
            return loss(outputs, targets)
        first, second, shares = targets
        one, other = loss(outputs, first), loss(outputs, second)
        return torch.lerp(other, one, shares[0].to(one.dtype))

    return of_mixed
