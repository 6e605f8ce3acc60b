"""The synthetic memorization dataset of the AND-mask paper (§3.1, B.2): spirals to learn, shortcuts to avoid."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from concord.environments import Environments
from concord.environments.collection import generator_for
from concord.options import OptionGroup, option_values

MECHANISM_DIMENSIONS = 2


@dataclass(frozen=True, kw_only=True)
class SpiralOptions(OptionGroup):
    """Spirals that all environments share, and shortcuts that differ."""

    # fmt: off
    environments: int = 32
    """Number of training environments, the paper's D."""
    examples: int = 1280
    """Number of training examples of each environment; held-out examples are additional."""
    test_examples: int = 2000
    """Number of examples of the out-of-distribution test, each with its own shortcuts."""
    validation_environments: int = 0
    """Number of validation environments, with their own shortcuts, which select models without the test."""
    shortcut_dimensions: int = 32
    """Number of dimensions of the shortcuts, d_S."""
    shortcut_scale: float = 0.1**0.5
    """Standard deviation of the shortcuts' components; the paper's N(0, 0.1), read as a variance, is 0.316."""
    revolutions: float = 3.0
    """Number of revolutions of each spiral."""
    smallest_radius: float = 0.08
    """Smallest radius of the spirals, before noise."""
    largest_radius: float = 1.0
    """Largest radius of the spirals, before noise."""
    radius_noise: float = 0.02
    """Largest noise on the radius."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(1, "environments", "examples", "test_examples")
        self.require_at_least(0, "validation_environments", "shortcut_dimensions", "shortcut_scale", "revolutions")
        self.require_at_least(0, "radius_noise")
        right = 0 <= self.smallest_radius < self.largest_radius
        self.require("smallest_radius", right, f"must be at least 0 and below the largest, {self.largest_radius}")


@dataclass(frozen=True, kw_only=True)
class Spirals(SpiralOptions):
    """Two interleaved spirals, the same in all environments, beside shortcuts that differ between environments.

    An example of class y ∈ {0, 1} begins with its place on spiral y: radius r ~ U(0.08, 1), angle 2πnr, turned by π
    for class 0, and then U(-0.02, 0.02) is added to the radius. The two coordinates are divided by their standard
    deviation over the distribution, as in the paper's code. The shortcuts follow: each environment draws one vector
    from N(0, σ²) for class 1, and has its negative for class 0. In the test environment each example draws its own
    shortcuts.

    A standard deviation σ of 0.316 has the paper's printed variance 0.1.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        self.check()

    @staticmethod
    def of(options: SpiralOptions, held_out: float, seed: int) -> "Spirals":
        """The data of these options; the held-out examples come on top."""
        return Spirals(**option_values(options) | {"examples": round(options.examples / (1 - held_out)), "seed": seed})

    def as_environments(self) -> Environments:
        """The environments ``train-000 …``, ``validation-000 …`` and ``ood``, each generated when it is loaded."""
        return Environments(
            self.load,
            train=[f"train-{index:03d}" for index in range(self.environments)],
            validation=[f"validation-{index:03d}" for index in range(self.validation_environments)],
            test=["ood"],
        )

    def load(self, name: str) -> tuple[Tensor, Tensor]:
        """Inputs ``(examples, 2 + d_S)`` float32 and targets ``(examples,)`` int64 of one environment."""
        generator = generator_for(self.seed, "spirals", name)
        count = self.test_examples if name == "ood" else self.examples
        targets = torch.randint(0, 2, (count,), generator=generator)
        mechanism = self._mechanism(targets, generator)
        if name == "ood":
            shortcuts = torch.randn(count, self.shortcut_dimensions, generator=generator) * self.shortcut_scale
        else:
            shortcut = torch.randn(self.shortcut_dimensions, generator=generator) * self.shortcut_scale
            shortcuts = (2 * targets - 1)[:, None] * shortcut
        return torch.cat([mechanism, shortcuts], dim=1), targets

    def _mechanism(self, targets: Tensor, generator: torch.Generator) -> Tensor:
        span = self.largest_radius - self.smallest_radius
        radius = self.smallest_radius + span * torch.rand(len(targets), generator=generator)
        angle = 2 * torch.pi * self.revolutions * radius + torch.pi * (1 - targets)
        noisy = radius + self.radius_noise * (2 * torch.rand(len(targets), generator=generator) - 1)
        coordinates = torch.stack([noisy * angle.cos(), noisy * angle.sin()], dim=1)
        return coordinates / torch.tensor(self._coordinate_deviations(), dtype=torch.float32)

    def _coordinate_deviations(self) -> tuple[float, float]:
        """Standard deviations of the two coordinates over the distribution (both classes; their means are 0)."""
        radius = np.linspace(self.smallest_radius, self.largest_radius, 20_001)
        angle = 2 * np.pi * self.revolutions * radius
        squared_radius = radius**2 + self.radius_noise**2 / 3
        return (
            float(np.sqrt(np.mean(squared_radius * np.cos(angle) ** 2))),
            float(np.sqrt(np.mean(squared_radius * np.sin(angle) ** 2))),
        )
