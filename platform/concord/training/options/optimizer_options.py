"""Options of the optimizer."""

import math
from dataclasses import dataclass
from typing import Literal

from concord.options import OptionGroup, Role, option_values

OptimizerName = Literal["adam", "sgd", "temporal-and-mask"]


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(OptionGroup):
    """The optimizer of the aggregated gradient."""

    role = Role.LEARNING

    # fmt: off
    optimizer: OptimizerName = "adam"
    """Adam, SGD with momentum, or Adam with a mask: a weight moves only while its gradients agree over time."""
    lr: float = 1e-3
    """Learning rate."""
    momentum: float = 0.9
    """Momentum of SGD."""
    beta1: float | None = None
    """β₁ of Adam, with and without mask; by default 0.9, or 0 with --environment-momentum, since two averages in a row
    overshoot."""
    beta2: float = 0.999
    """β₂ of Adam, with and without mask."""
    beta3: float = 0.9
    """β₃, the decay of the average of signs, with --optimizer temporal-and-mask."""
    bias_correction: bool = True
    """Adam's correction of averages that begin at 0; the paper prints temporal AND-mask Adam without it."""
    temporal_threshold: float = 0.4
    """Agreement threshold τ over time, with --optimizer temporal-and-mask."""
    l1: float = 0.0
    """Coefficient of the L1 penalty."""
    l2: float = 0.0
    """Coefficient of the L2 penalty."""
    regularization: Literal["decoupled", "coupled"] = "decoupled"
    """L1 and L2 as an update of their own, times the learning rate (decoupled), or added to the gradient after masking
    (coupled); an objective that is divided by a large penalty weight divides these, too."""
    clip: float = 0.0
    """Largest norm of the aggregated gradient; 0 does not clip."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of layers in training: bfloat16 (autocast) is faster on hardware that supports it."""
    # fmt: on

    @property
    def betas(self) -> tuple[float, float]:
        """β₁ and β₂ of Adam; of resolved options."""
        return 0.9 if self.beta1 is None else self.beta1, self.beta2

    def unused(self) -> frozenset[str]:
        """The options of other optimizers and of disabled features."""
        used = {
            "momentum": self.optimizer == "sgd",
            **dict.fromkeys(("beta1", "beta2"), self.optimizer != "sgd"),
            **dict.fromkeys(("beta3", "temporal_threshold", "bias_correction"), self.optimizer == "temporal-and-mask"),
            "regularization": self.l1 > 0 or self.l2 > 0,
        }
        return frozenset(name for name, is_used in used.items() if not is_used)

    def check(self) -> None:
        """Validate options."""
        values = option_values(self)
        self.require_at_least(0, "l1", "l2", "clip")
        for option in ("momentum", "beta1", "beta2", "beta3"):
            right = (option == "beta1" and self.beta1 is None) or 0 <= values[option] < 1
            self.require(option, right, "must lie in [0, 1)")
        right = 0 <= self.temporal_threshold <= 1
        self.require("temporal_threshold", right, "the agreement threshold must lie in [0, 1]")
        right = self.bias_correction or self.optimizer == "temporal-and-mask"
        self.require("bias_correction", right, "only --optimizer temporal-and-mask can switch it off")
        self.require("lr", 0 < self.lr < math.inf, "must be a finite number above 0")
