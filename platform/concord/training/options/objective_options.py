"""Options of the objective."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from concord.built_in import OBJECTIVES
from concord.options import OptionGroup, Role, option_values

# Objectives need PyTorch, which takes a second or two: help and a wrong option do without.
if TYPE_CHECKING:
    import torch

    from concord.gradients import Loss, Risk
    from concord.objectives import Objective

    ObjectiveOption = str
else:
    ObjectiveOption = Literal[OBJECTIVES.names]


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(OptionGroup):
    """The objective."""

    role = Role.LEARNING

    # fmt: off
    objective: ObjectiveOption = "erm"
    """Function to minimize: the mean risk (erm); with a penalty on its slope by a factor of the outputs (irm), on
    differences of risks (vrex), gradients (fishr, iga) or representations (coral, mmd), on large outputs (sd), or
    against a classifier of environments (dann); the largest risks (mm-rex, group-dro, eqrm); the risks of mixed
    examples (mixup), or after a step on another environment (meta-irm)."""
    penalty_weight: float | None = None
    """Weight of the penalty: λ, β of vrex, -λ_min of mm-rex, λ of meta-irm's standard deviation. By default 1e4 for irm
    and vrex, 1e3 for fishr and iga, 1 for mm-rex, coral, mmd and dann, 0.1 for sd, 0 for meta-irm."""
    penalty_warmup: float = 0.0
    """Fraction of the run, in [0, 1), before the penalty gets its weight and eqrm its quantile. Until then the weight
    is 0; for irm, vrex, coral, mmd, fishr and iga it is 1, or the weight if that is less."""
    penalty_estimator: Literal["squared", "halves"] = "squared"
    """Estimate of irm's penalty: the squared gradient of a batch, or the product of the gradients of its halves."""
    irm_classifier: Literal["scalar", "vector"] = "scalar"
    """Factor of irm's penalty: one of all outputs, or one of each output, as in published code for several classes."""
    representation: str | None = None
    """Name of the linear layer whose input is the representation (coral, mmd, dann), or whose gradients are compared
    (fishr); by default the last linear layer."""
    domain_units: int = 256
    """Width of the two hidden layers of dann's domain classifier."""
    group_rate: float = 0.01
    """Step size η of the environments' weights (group-dro)."""
    quantile: float = 0.75
    """Quantile α of the risks that eqrm minimizes, in (0, 1)."""
    variance_momentum: float = 0.95
    """Decay γ of the moving average of fishr's variances over steps, in [0, 1); 0 takes each step's own variances."""
    mixup_alpha: float = 0.2
    """α of mixup: the shares of two mixed examples are drawn from Beta(α, α)."""
    inner_lr: float = 0.1
    """Learning rate α of the inner steps of meta-irm."""
    inner_steps: int = 1
    """Number of inner steps of meta-irm."""
    drop_grad: float = 0.0
    """Rate of Gaussian DropGrad in the inner steps of meta-irm, in [0, 1)."""
    outer_environments: int = 0
    """Number of other environments, drawn at each step, that judge the adapted weights of meta-irm; 0 takes all."""
    first_order: bool = False
    """Omit the second derivatives of meta-irm (an ablation of the paper)."""
    same_environment: bool = False
    """Judge the adapted weights of meta-irm on their own environment (an ablation of the paper)."""
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of the other objectives."""
        from concord.objectives.objectives_by_name import used_options

        return frozenset(option_values(self).keys() - {"objective"} - used_options(self.objective))

    def check(self) -> None:
        """Validate options; the objective checks its own."""
        from torch.nn.functional import mse_loss

        self.require("penalty_warmup", 0 <= self.penalty_warmup < 1, "must be a fraction of the run, in [0, 1)")
        self.require_at_least(0, "outer_environments")
        self.require_at_least(1, "domain_units")
        self.build(mse_loss, 1)  # any loss: only the options are tested

    def build(self, loss: "Loss | Risk", steps: int, autocast: "torch.dtype | None" = None) -> "Objective":
        """The objective of a run with this number of steps."""
        from concord.objectives import objective

        options = option_values(self)
        name, warmup = options.pop("objective"), options.pop("penalty_warmup")
        return objective(name, loss, warmup_steps=round(warmup * steps), autocast=autocast, **options)
