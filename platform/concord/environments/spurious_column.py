"""A table with one more column, which follows the label in training and misleads in the test."""

from dataclasses import dataclass

import torch
from torch import Tensor

from concord.environments.collection import Environments, generator_for
from concord.environments.misleading import misled, require_probabilities
from concord.errors import ArgumentError

_TEST = 0.3  # of the rows


@dataclass(frozen=True)
class SpuriousColumn:
    """Rows of two classes dealt out to environments, with a column that is the label's sign, wrong with p_e.

    What Colored MNIST does with colours, for any table: labels are flipped with probability η, so that the columns
    alone cannot be right as often as the spurious one is in training.

    Args:
        inputs: ``(rows, columns)``.
        targets: ``(rows,)``, 0 or 1.
        flips: p_e of each training environment.
        validation_flip: p_e of the validation environment, with rows of its own.
        test_flip: p_e of the test ``ood``.
        noise: η.
        seed: of the split and the flips.

    Raises:
        InputError: no environment, a probability outside [0, 1], or fewer rows than environments.
    """

    inputs: Tensor
    targets: Tensor
    flips: tuple[float, ...] = (0.05, 0.1, 0.15)
    validation_flip: float = 0.5
    test_flip: float = 0.9
    noise: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require_probabilities(
            flips=self.flips, validation_flip=self.validation_flip, test_flip=self.test_flip, noise=self.noise
        )
        if not 1 <= len(self.flips) < (1 - _TEST) * len(self.targets) - 1:
            raise ArgumentError("flips", self.flips, "give a probability for each training environment")

    def as_environments(self) -> Environments:
        """The environments ``site-0 …``, ``validation`` and ``ood``."""
        return Environments(self._load, [f"site-{index}" for index in range(len(self.flips))], ["validation"], ["ood"])

    def _load(self, name: str) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(self.targets), generator=generator_for(self.seed, "sites"))
        tests = round(_TEST * len(order))
        parts = [("ood", self.test_flip, order[:tests])]
        # The validation environment has as many rows as one that trains.
        others = [("validation", self.validation_flip), *((f"site-{i}", flip) for i, flip in enumerate(self.flips))]
        parts += [(other, flip, order[tests:][i :: len(others)]) for i, (other, flip) in enumerate(others)]
        flip, chosen = next((flip, rows) for each, flip, rows in parts if each == name)
        labels = misled(self.targets[chosen], 2, self.noise, self.seed, "labels", name)
        column = misled(labels, 2, flip, self.seed, "column", name)
        return torch.cat([self.inputs[chosen], (2 * column - 1)[:, None].float()], 1), labels
