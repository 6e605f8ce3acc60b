"""The objectives by the names that the command line and configurations use."""

from typing import Literal, get_args

import torch

from concord.errors import ArgumentError
from concord.objectives.dann import DANN
from concord.objectives.erm import ERM
from concord.objectives.irm import Estimator, IRMv1
from concord.objectives.meta_irm import MetaIRM
from concord.objectives.mm_rex import MMREx
from concord.objectives.objective import Loss, Objective
from concord.objectives.penalty_weight import PenaltyWeight
from concord.objectives.vrex import VREx

ObjectiveName = Literal["erm", "irm", "vrex", "mm-rex", "dann", "meta-irm"]
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
# Their gradients are not averages over environments that another aggregator could form.
COUPLED = frozenset({"vrex", "mm-rex", "dann", "meta-irm"})
# The weight of the penalty where none is given: those that the published experiments have, or none.
_DEFAULT_WEIGHTS = {"irm": 1e4, "vrex": 1e4, "mm-rex": 1.0, "dann": 1.0, "meta-irm": 0.0}


def default_penalty_weight(name: ObjectiveName) -> float | None:
    """The weight of this objective's penalty where none is given; None for one without a penalty."""
    return _DEFAULT_WEIGHTS.get(name)


def objective(
    name: ObjectiveName,
    loss: Loss,
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
    autocast: torch.dtype | None = None,
) -> Objective:
    """The objective called ``name``; options that it does not have are not looked at.

    Args:
        name: of the objective.
        loss: the risk of a batch.
        penalty_weight: λ of ``irm``, ``dann`` and ``meta-irm``, β of ``vrex``, -λ_min of ``mm-rex``; None takes
            1e4 for ``irm`` and ``vrex``, 1 for ``mm-rex`` and ``dann``, 0 for ``meta-irm``.
        warmup_steps: steps before the penalty has its weight.
        estimator: of the penalty of ``irm``.
        inner_lr, inner_steps, drop_grad, outer, first_order, same_environment: see :class:`MetaIRM`.
        autocast: what layers compute in.

    Raises:
        InputError: no objective has this name, or an option is out of its range.
    """
    if name == "erm":
        return ERM(loss, autocast)
    if name not in OBJECTIVES:
        raise ArgumentError("objective", name, f"must be one of {', '.join(OBJECTIVES)}")
    weight = PenaltyWeight(_DEFAULT_WEIGHTS[name] if penalty_weight is None else penalty_weight, warmup_steps)
    match name:
        case "irm":
            return IRMv1(loss, weight, estimator, autocast)
        case "vrex":
            return VREx(loss, weight, autocast)
        case "mm-rex":
            return MMREx(loss, weight, autocast)
        case "dann":
            return DANN(loss, weight, autocast)
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
