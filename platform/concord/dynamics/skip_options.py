"""Options of adaptive skip intervals."""

from dataclasses import dataclass
from typing import Literal

from concord.dynamics.curriculum import Curriculum
from concord.dynamics.skip_risk import SkipRisk
from concord.dynamics.unroll import SkipConfig
from concord.options import OptionGroup, option_values


@dataclass(frozen=True, kw_only=True)
class SkipOptions(OptionGroup):
    """The later frame with which a prediction is compared."""

    # fmt: off
    skip: Literal["adaptive", "fixed"] = "adaptive"
    """The frame within --horizon that it matches best, or always the one --stride later."""
    horizon: int = 21
    """H, the most frames that a prediction skips to."""
    stride: int = 1
    """Δt, the frames from one prediction to the next, with --skip fixed."""
    exploration_steps: int = 0
    """K, steps over which the probability of a frame drawn at random falls from 1 to 0; 0 explores never."""
    sampling_steps: int = 20_000
    """S: the probability of going on from the frame of the data at step i is 1/(1 + i/(0.2 S)); 0: from the model's own
    predictions always."""
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of the other way to skip."""
        return frozenset({"stride"} if self.skip == "adaptive" else {"horizon", "exploration_steps"})

    def check(self) -> None:
        """Validate options."""
        values = option_values(self)
        for option in ("horizon", "stride"):
            self.require(option, values[option] >= 1, "must be at least 1")
        for option in ("exploration_steps", "sampling_steps"):
            self.require(option, values[option] >= 0, "must not be negative")
        right = self.skip == "fixed" or self.stride == 1
        self.require("stride", right, "--skip adaptive finds its own; give --skip fixed")

    @property
    def skips(self) -> SkipConfig:
        """The matching of predictions."""
        return SkipConfig(self.horizon, None if self.skip == "adaptive" else self.stride)

    def risk(self, seed: int) -> SkipRisk:
        """The risk of a batch of sequences; draws follow the seed."""
        explored = self.exploration_steps if self.skip == "adaptive" else 0
        return SkipRisk(self.skips, Curriculum(explored, self.sampling_steps), seed)
