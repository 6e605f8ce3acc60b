"""Options of the objective, a group for each."""

from dataclasses import dataclass, field

import torch
from torch import nn

from concord.gradients import Loss, Risk
from concord.objectives import Estimator, Objective, ObjectiveName, objective
from concord.options import OptionGroup, option_values


@dataclass(frozen=True, kw_only=True)
class PenaltyOptions(OptionGroup):
    """The penalty that an objective adds to the mean risk."""

    # fmt: off
    penalty_weight: float | None = None
    """The penalty's weight: β of vrex, -λ_min of mm-rex, of the meta-losses' standard deviation in meta-irm; by default
    1e4 for irm and vrex, 1e3 for fishr and iga, 1 for mm-rex, coral, mmd and dann, 0.1 for sd, 0 for meta-irm."""
    penalty_warmup: float = 0.0
    """Fraction of the run before the penalty gets its weight, and eqrm its quantile; until then the weight is 0, or for
    irm, vrex, fishr, iga, coral and mmd 1."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require("penalty_warmup", 0 <= self.penalty_warmup < 1, "must be a fraction of the run, in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class IRMOptions(OptionGroup):
    """Invariant risk minimization, with --objective irm."""

    # fmt: off
    penalty_estimator: Estimator = "squared"
    """How irm estimates its penalty: the squared gradient of a batch, or the product of its two halves' gradients."""
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class MetaIRMOptions(OptionGroup):
    """Meta-learned IRM, with --objective meta-irm."""

    # fmt: off
    inner_lr: float = 0.1
    """Learning rate α of the inner steps of meta-irm."""
    inner_steps: int = 1
    """Inner steps of meta-irm."""
    drop_grad: float = 0.0
    """Rate of Gaussian DropGrad in the inner steps of meta-irm; [0, 1)."""
    outer_environments: int = 0
    """Number of other environments, drawn at each step, on which adapted weights are tested (meta-irm); 0 takes all."""
    first_order: bool = False
    """Leave out the second derivatives of meta-irm (an ablation of the paper)."""
    same_environment: bool = False
    """Test adapted weights on their own environment as well (meta-irm; an ablation of the paper)."""
    # fmt: on

    def check(self) -> None:
        """Validate options; the objective checks the others."""
        self.require("outer_environments", self.outer_environments >= 0, "must not be negative")


@dataclass(frozen=True, kw_only=True)
class RepresentationOptions(OptionGroup):
    """The representation, with --objective fishr, coral, mmd or dann."""

    # fmt: off
    representation: str | None = None
    """Name of the linear layer whose input is the representation (coral, mmd, dann), or whose gradients are compared
    (fishr); the last one by default."""
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class DANNOptions(OptionGroup):
    """The classifier of environments, with --objective dann."""

    # fmt: off
    domain_units: int = 256
    """Width of the two hidden layers of dann's domain classifier."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require("domain_units", self.domain_units >= 1, "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class GroupDROOptions(OptionGroup):
    """Distributionally robust optimization, with --objective group-dro."""

    # fmt: off
    group_rate: float = 0.01
    """Step size η of the environments' weights (group-dro)."""
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class EQRMOptions(OptionGroup):
    """Quantile risk minimization, with --objective eqrm."""

    # fmt: off
    quantile: float = 0.75
    """Quantile α of the risks that eqrm minimizes; (0, 1)."""
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class FishrOptions(OptionGroup):
    """Fishr, with --objective fishr."""

    # fmt: off
    variance_momentum: float = 0.95
    """Moving average γ of fishr's variances over steps; [0, 1), 0 takes each step's own."""
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class MixupOptions(OptionGroup):
    """Mixup between environments, with --objective mixup."""

    # fmt: off
    mixup_alpha: float = 0.2
    """Mixup draws the shares of two environments from Beta(α, α)."""
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(OptionGroup):
    """The objective."""

    # fmt: off
    objective: ObjectiveName = "erm"
    """Objective: the environments' mean risk (erm), with a penalty on its scale (irm), risks (vrex), gradients (fishr,
    iga), representations (coral, mmd) or outputs (sd); the worst risks (mm-rex, group-dro, eqrm); against a classifier
    of environments (dann); risks of mixed examples (mixup), or after adapting to another environment (meta-irm)."""
    penalty: PenaltyOptions = field(default_factory=PenaltyOptions)
    irm: IRMOptions = field(default_factory=IRMOptions)
    meta_irm: MetaIRMOptions = field(default_factory=MetaIRMOptions)
    representations: RepresentationOptions = field(default_factory=RepresentationOptions)
    dann: DANNOptions = field(default_factory=DANNOptions)
    group_dro: GroupDROOptions = field(default_factory=GroupDROOptions)
    eqrm: EQRMOptions = field(default_factory=EQRMOptions)
    fishr: FishrOptions = field(default_factory=FishrOptions)
    mixup: MixupOptions = field(default_factory=MixupOptions)
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of the other objectives."""
        looked_at: dict[OptionGroup, bool] = {
            self.penalty: self.objective not in ("erm", "group-dro", "mixup"),
            self.irm: self.objective == "irm",
            self.meta_irm: self.objective == "meta-irm",
            self.representations: self.objective in ("fishr", "coral", "mmd", "dann"),
            self.dann: self.objective == "dann",
            self.group_dro: self.objective == "group-dro",
            self.eqrm: self.objective == "eqrm",
            self.fishr: self.objective == "fishr",
            self.mixup: self.objective == "mixup",
        }
        unused = frozenset(name for group, looked in looked_at.items() if not looked for name in option_values(group))
        return unused | ({"penalty_weight"} if self.objective == "eqrm" else set())

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.made(nn.functional.mse_loss, 1)  # any loss: only the options are tested

    def made(self, loss: Loss | Risk, steps: int, autocast: torch.dtype | None = None) -> Objective:
        """The objective of a run with this number of steps."""
        return objective(
            self.objective,
            loss,
            penalty_weight=self.penalty.penalty_weight,
            warmup_steps=round(self.penalty.penalty_warmup * steps),
            estimator=self.irm.penalty_estimator,
            inner_lr=self.meta_irm.inner_lr,
            inner_steps=self.meta_irm.inner_steps,
            drop_grad=self.meta_irm.drop_grad,
            outer=self.meta_irm.outer_environments,
            first_order=self.meta_irm.first_order,
            same_environment=self.meta_irm.same_environment,
            domain_units=self.dann.domain_units,
            group_rate=self.group_dro.group_rate,
            quantile=self.eqrm.quantile,
            variance_momentum=self.fishr.variance_momentum,
            mixup_alpha=self.mixup.mixup_alpha,
            representation=self.representations.representation,
            autocast=autocast,
        )
