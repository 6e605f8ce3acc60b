"""Real examples beside a code of their class, another one in every domain: a shortcut that only the domain has."""

from dataclasses import dataclass

import torch
from torch import Tensor

from concord.environments.collection import Environments, generator_for
from concord.errors import ArgumentError

_TEST = 0.2  # of the examples
_VALIDATION = 0.2


@dataclass(frozen=True)
class CodedDomains:
    """Labelled examples dealt out to domains, with the domain's code of the label beside the inputs.

    The shortcuts of :class:`~concord.environments.Spirals` for data and classes of any kind. A domain draws one code a
    class from N(0, σ²). Each example is in one domain alone: a fifth is the test ``ood``, where every example has a
    code of its own, a fifth the validation domains, with codes that no training domain has.

    Args:
        inputs: ``(examples, features)``.
        targets: ``(examples,)``, classes.
        domains: how many train.
        validation_domains: how many more there are to choose models by.
        code_dimensions: numbers of a code; 0 has no shortcut.
        code_scale: their standard deviation σ.
        seed: of the split and the codes.

    Raises:
        InputError: a number is out of its range, or there are fewer examples than domains.
    """

    inputs: Tensor
    targets: Tensor
    domains: int = 5
    validation_domains: int = 2
    code_dimensions: int = 32
    code_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("validation_domains", "code_dimensions", "code_scale"):
            if getattr(self, option) < 0:
                raise ArgumentError(option, getattr(self, option), "must not be negative")
        most = len(self.targets) - sum(self._counts())
        if not 1 <= self.domains <= most:
            raise ArgumentError("domains", self.domains, f"must lie in [1, {most}], the examples that train")
        if self.validation_domains > self._counts()[1]:
            expected = f"must be at most {self._counts()[1]}, the examples for validation"
            raise ArgumentError("validation_domains", self.validation_domains, expected)

    def as_environments(self) -> Environments:
        """The environments ``domain-000 …``, ``validation-000 …`` and ``ood``."""
        train = [f"domain-{index:03d}" for index in range(self.domains)]
        validation = [f"validation-{index:03d}" for index in range(self.validation_domains)]
        return Environments(self._load, train, validation, ["ood"])

    def _counts(self) -> tuple[int, int]:
        """How many examples test, and how many validate."""
        examples = len(self.targets)
        return round(_TEST * examples), round(_VALIDATION * examples) if self.validation_domains else 0

    def _load(self, name: str) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(self.targets), generator=generator_for(self.seed, "domains"))
        tests, validates = self._counts()
        kind, _, number = name.partition("-")
        if kind == "ood":
            chosen = order[:tests]
        elif kind == "validation":
            chosen = order[tests : tests + validates][int(number) :: self.validation_domains]
        else:
            chosen = order[tests + validates :][int(number) :: self.domains]
        targets, generator = self.targets[chosen], generator_for(self.seed, "codes", name)
        rows = len(chosen) if kind == "ood" else int(self.targets.max()) + 1
        codes = torch.randn(rows, self.code_dimensions, generator=generator) * self.code_scale
        return torch.cat([self.inputs[chosen], codes if kind == "ood" else codes[targets]], 1), targets
