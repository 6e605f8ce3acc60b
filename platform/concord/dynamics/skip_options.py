"""Options of adaptive skip intervals."""

from dataclasses import dataclass
from typing import Literal

from concord.dynamics.curriculum import Curriculum
from concord.dynamics.matching import FrameLoss
from concord.dynamics.skip_risk import SkipRisk
from concord.dynamics.unroll import SkipConfig
from concord.options import OptionGroup


@dataclass(frozen=True, kw_only=True)
class SkipOptions(OptionGroup):
    """The later frame with which a prediction is compared."""

    # fmt: off
    skip: Literal["adaptive", "fixed"] = "adaptive"
    """Target of a prediction: the best match within --horizon (adaptive), or the frame --stride later (fixed)."""
    horizon: int = 21
    """H: largest skip of a prediction, in frames."""
    stride: int = 1
    """Δt: frames from one prediction to the next, with --skip fixed."""
    exploration_steps: int = 0
    """K: steps in which the probability of a random target falls from 1 to 0; 0 never explores."""
    sampling_steps: int = 20_000
    """S: at step i a prediction starts from the frame of the data with probability 1/(1 + i/(0.2 S)); 0: always from
    the model's own prediction."""
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of the other way to skip."""
        return frozenset({"stride"} if self.skip == "adaptive" else {"horizon", "exploration_steps"})

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(1, "horizon", "stride")
        self.require_at_least(0, "exploration_steps", "sampling_steps")
        right = self.skip == "fixed" or self.stride == 1
        self.require("stride", right, "--skip adaptive finds its own; give --skip fixed")

    @property
    def skips(self) -> SkipConfig:
        """The matching of predictions."""
        return SkipConfig(self.horizon, None if self.skip == "adaptive" else self.stride)

    def risk(self, seed: int, loss: FrameLoss | None = None) -> SkipRisk:
        """The risk of a batch of sequences; draws follow the seed. See :class:`SkipRisk` for the loss."""
        explored = self.exploration_steps if self.skip == "adaptive" else 0
        return SkipRisk(self.skips, Curriculum(explored, self.sampling_steps), seed, loss)
