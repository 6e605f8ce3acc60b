"""The objectives by the names that the command line and configurations use."""

from typing import Literal, get_args

import torch

from concord.errors import ArgumentError
from concord.gradients.risk import Loss, Risk
from concord.objectives.dann import DANN
from concord.objectives.erm import ERM
from concord.objectives.irm import Estimator, IRMv1
from concord.objectives.meta_irm import MetaIRM
from concord.objectives.mm_rex import MMREx
from concord.objectives.objective import Objective
from concord.objectives.penalty_weight import PenaltyWeight
from concord.objectives.vrex import VREx

ObjectiveName = Literal["erm", "irm", "vrex", "mm-rex", "dann", "meta-irm"]
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
_TYPES: dict[str, type[Objective]] = {
    "erm": ERM,
    "irm": IRMv1,
    "vrex": VREx,
    "mm-rex": MMREx,
    "dann": DANN,
    "meta-irm": MetaIRM,
}


def objective_type(name: str) -> type[Objective]:
    """The class of the objective called ``name``, whose attributes are ``coupled`` and ``default_weight``.

    Raises:
        ArgumentError: no objective has this name.
    """
    if name not in _TYPES:
        raise ArgumentError("objective", name, f"must be one of {', '.join(OBJECTIVES)}")
    return _TYPES[name]


def objective(
    name: ObjectiveName,
    loss: Loss | Risk,
    *,
    penalty_weight: float | None = None,
    warmup_steps: int = 0,
    estimator: Estimator = "squared",
    inner_lr: float = 0.1,
    inner_steps: int = 1,
    drop_grad: float = 0.0,
    outer: int = 0,
    first_order: bool = False,
    same_environment: bool = False,
    domain_units: int = 256,
    representation: str | None = None,
    autocast: torch.dtype | None = None,
) -> Objective:
    """The objective called ``name``; options that it does not have are ignored.

    Args:
        name: of the objective.
        loss: the loss or the risk of one environment.
        penalty_weight: λ of ``irm``, ``dann`` and ``meta-irm``, β of ``vrex``, -λ_min of ``mm-rex``; None takes
            1e4 for ``irm`` and ``vrex``, 1 for ``mm-rex`` and ``dann``, 0 for ``meta-irm``.
        warmup_steps: steps before the penalty has its weight.
        estimator: of the penalty of ``irm``.
        inner_lr, inner_steps, drop_grad, outer, first_order, same_environment: see :class:`MetaIRM`.
        domain_units, representation: of the domain classifier of ``dann``, see :class:`DomainClassifier`.
        autocast: what layers compute in.

    Raises:
        InputError: no objective has this name, or an option is out of its range.
    """
    default = objective_type(name).default_weight
    weight = PenaltyWeight(default or 0.0 if penalty_weight is None else penalty_weight, warmup_steps)
    match name:
        case "erm":
            return ERM(loss, autocast)
        case "irm":
            return IRMv1(loss, weight, estimator, autocast)
        case "vrex":
            return VREx(loss, weight, autocast)
        case "mm-rex":
            return MMREx(loss, weight, autocast)
        case "dann":
            return DANN(loss, weight, autocast, hidden_units=domain_units, layer=representation)
    return MetaIRM(
        loss,
        inner_lr,
        inner_steps,
        weight,
        drop_grad,
        outer,
        first_order=first_order,
        same_environment=same_environment,
        autocast=autocast,
    )
