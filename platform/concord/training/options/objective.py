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
    """λ of irm, dann and meta-irm (there of the meta-losses' standard deviation), β of vrex, -λ_min of mm-rex; by
    default 1e4 for irm and vrex, 1 for mm-rex and dann, 0 for meta-irm."""
    penalty_warmup: float = 0.0
    """Fraction of the run before the penalty gets its weight; for irm and vrex the weight is 1 until then."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require("penalty_warmup", 0 <= self.penalty_warmup < 1, "a fraction of the run, in [0, 1)")


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
class DANNOptions(OptionGroup):
    """The classifier of environments, with --objective dann."""

    # fmt: off
    domain_units: int = 256
    """Width of the two hidden layers of dann's domain classifier."""
    representation: str | None = None
    """Name of the linear layer whose input is the representation for dann; the last one by default."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require("domain_units", self.domain_units >= 1, "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(OptionGroup):
    """The objective."""

    # fmt: off
    objective: ObjectiveName = "erm"
    """Objective: the environments' mean risk (erm), with a penalty (irm, vrex), the worst combination of risks
    (mm-rex), against a classifier of environments (dann), or risks after adapting to another environment (meta-irm)."""
    penalty: PenaltyOptions = field(default_factory=PenaltyOptions)
    irm: IRMOptions = field(default_factory=IRMOptions)
    meta_irm: MetaIRMOptions = field(default_factory=MetaIRMOptions)
    dann: DANNOptions = field(default_factory=DANNOptions)
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of the other objectives."""
        looked_at: dict[OptionGroup, bool] = {
            self.penalty: self.objective != "erm",
            self.irm: self.objective == "irm",
            self.meta_irm: self.objective == "meta-irm",
            self.dann: self.objective == "dann",
        }
        return frozenset(name for group, looked in looked_at.items() if not looked for name in option_values(group))

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.made(nn.functional.mse_loss, 1)  # any loss: only the options are tested

    def made(self, loss: Loss | Risk, steps: int, autocast: torch.dtype | None = None) -> Objective:
        """The objective of a run with this number of steps.

        Raises:
            InputError: an option is out of its range.
        """
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
            representation=self.dann.representation,
            autocast=autocast,
        )
