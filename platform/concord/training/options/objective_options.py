"""Options of the objective."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import nn
from typing_extensions import Doc

from concord.gradients import Loss, Risk
from concord.objectives import OBJECTIVES, Objective, Rescaled, objective
from concord.objectives.objectives_by_name import REGISTRY, used_options
from concord.options import OptionGroup, Role, option_values

if TYPE_CHECKING:
    ObjectiveOption = str
else:
    ObjectiveOption = Literal[tuple(OBJECTIVES)]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _default_weights() -> str:
    """The default weights, from the largest, each with its objectives."""
    by_weight: dict[float, list[str]] = {}
    for name, kind in OBJECTIVES.items():
        if kind.default_weight is not None:
            by_weight.setdefault(kind.default_weight, []).append(name)
    exponents = {each: str(Decimal(str(each)).normalize()).replace("E+", "e") for each in by_weight}
    shown = {each: f"{each:g}" if each < 1e3 else exponents[each] for each in by_weight}
    return ", ".join(f"{shown[each]} for {_listed(by_weight[each])}" for each in sorted(by_weight, reverse=True))


_WEIGHT = (
    "Weight of the penalty: λ, β of vrex, -λ_min of mm-rex, λ of meta-irm's standard deviation. By default "
    f"{_default_weights()}."
)
_RESCALED = [name for name, kind in OBJECTIVES.items() if issubclass(kind, Rescaled) and kind.warms_up_at_one]
_WARMUP = (
    "Fraction of the run, in [0, 1), before the penalty gets its weight and eqrm its quantile. Until then the weight "
    f"is 0; for {_listed(_RESCALED)} it is 1, or the weight if that is less."
)


@dataclass(frozen=True, kw_only=True)
@REGISTRY.add_options(after="penalty_warmup")
class ObjectiveOptions(OptionGroup):
    """The objective."""

    role = Role.LEARNING

    # fmt: off
    objective: ObjectiveOption = "erm"
    """Function to minimize: the mean risk (erm); with a penalty on its slope by a factor of the outputs (irm), on
    differences of risks (vrex), gradients (fishr, iga) or representations (coral, mmd), on large outputs (sd), or
    against a classifier of environments (dann); the largest risks (mm-rex, group-dro, eqrm); the risks of mixed
    examples (mixup), or after a step on another environment (meta-irm)."""
    penalty_weight: Annotated[float | None, Doc(_WEIGHT)] = None
    penalty_warmup: Annotated[float, Doc(_WARMUP)] = 0.0
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of the other objectives."""
        return frozenset(option_values(self).keys() - {"objective"} - used_options(self.objective))

    def check(self) -> None:
        """Validate options; the objective checks its own."""
        self.require("penalty_warmup", 0 <= self.penalty_warmup < 1, "must be a fraction of the run, in [0, 1)")
        self.require_at_least(0, "outer_environments")
        self.require_at_least(1, "domain_units")
        self.build(nn.functional.mse_loss, 1)  # any loss: only the options are tested

    def build(self, loss: Loss | Risk, steps: int, autocast: torch.dtype | None = None) -> Objective:
        """The objective of a run with this number of steps."""
        options = option_values(self)
        name, warmup = options.pop("objective"), options.pop("penalty_warmup")
        return objective(name, loss, warmup_steps=round(warmup * steps), autocast=autocast, **options)
