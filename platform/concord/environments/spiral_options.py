"""Options of the synthetic memorization dataset."""

from dataclasses import dataclass

from concord.errors import ArgumentError
from concord.options import OptionGroup


@dataclass(frozen=True, kw_only=True)
class SpiralOptions(OptionGroup):
    """Spirals that all environments share, and shortcuts that differ."""

    # fmt: off
    environments: int = 32
    """Training environments, the paper's D."""
    examples: int = 1280
    """Training examples of each environment; its held-out part comes on top."""
    test_examples: int = 2000
    """Examples of the out-of-distribution test, each with shortcuts of its own."""
    validation_environments: int = 0
    """More environments, with shortcuts of their own, to choose models by without looking at the test."""
    shortcut_dimensions: int = 32
    """Dimensions of the shortcuts, d_S."""
    shortcut_scale: float = 0.1**0.5
    """Standard deviation of the shortcuts' components; the paper's N(0, 0.1), read as a variance, is 0.316."""
    revolutions: float = 3.0
    """Revolutions of each spiral."""
    smallest_radius: float = 0.08
    """Smallest radius of the spirals, before noise."""
    largest_radius: float = 1.0
    """Largest radius of the spirals, before noise."""
    radius_noise: float = 0.02
    """Largest noise on the radius."""
    # fmt: on

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        for option in ("environments", "examples", "test_examples"):
            if getattr(self, option) < 1:
                raise ArgumentError(option, getattr(self, option), "must be at least 1")
        for option in (
            "shortcut_dimensions",
            "validation_environments",
            "shortcut_scale",
            "revolutions",
            "radius_noise",
        ):
            if getattr(self, option) < 0:
                raise ArgumentError(option, getattr(self, option), "must not be negative")
        if not 0 <= self.smallest_radius < self.largest_radius:
            expected = f"must be at least 0 and below the largest, {self.largest_radius}"
            raise ArgumentError("smallest_radius", self.smallest_radius, expected)
