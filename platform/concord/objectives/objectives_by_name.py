"""The objectives by the names that the command line and configurations use."""

from typing import Literal, get_args

import torch

from concord.errors import ArgumentError
from concord.gradients.risk import Loss, Risk
from concord.objectives.coral import CORAL
from concord.objectives.dann import DANN
from concord.objectives.eqrm import EQRM
from concord.objectives.erm import ERM
from concord.objectives.fishr import Fishr
from concord.objectives.group_dro import GroupDRO
from concord.objectives.iga import IGA
from concord.objectives.irm import Estimator, IRMv1
from concord.objectives.meta_irm import MetaIRM
from concord.objectives.mixup import Mixup
from concord.objectives.mm_rex import MMREx
from concord.objectives.mmd import MMD
from concord.objectives.objective import Objective
from concord.objectives.penalty_weight import PenaltyWeight
from concord.objectives.spectral_decoupling import SpectralDecoupling
from concord.objectives.vrex import VREx

ObjectiveName = Literal[
    "erm",
    "irm",
    "vrex",
    "mm-rex",
    "group-dro",
    "eqrm",
    "fishr",
    "iga",
    "coral",
    "mmd",
    "dann",
    "mixup",
    "sd",
    "meta-irm",
]
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
_TYPES: dict[str, type[Objective]] = {
    "erm": ERM,
    "irm": IRMv1,
    "vrex": VREx,
    "mm-rex": MMREx,
    "group-dro": GroupDRO,
    "eqrm": EQRM,
    "fishr": Fishr,
    "iga": IGA,
    "coral": CORAL,
    "mmd": MMD,
    "dann": DANN,
    "mixup": Mixup,
    "sd": SpectralDecoupling,
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
    group_rate: float = 0.01,
    quantile: float = 0.75,
    variance_momentum: float = 0.95,
    mixup_alpha: float = 0.2,
    representation: str | None = None,
    autocast: torch.dtype | None = None,
) -> Objective:
    """The objective called ``name``; options that it does not have are ignored.

    Args:
        name: the objective's name.
        loss: the loss or the risk of one environment.
        penalty_weight: the weight of the penalty, λ, β of ``vrex``, -λ_min of ``mm-rex``; None takes the objective's
            ``default_weight``.
        warmup_steps: steps before the penalty has its weight.
        estimator: the estimator of the penalty of ``irm``.
        inner_lr, inner_steps, drop_grad, outer, first_order, same_environment: see :class:`MetaIRM`.
        domain_units: the hidden width of ``dann``'s domain classifier, see :class:`DomainClassifier`.
        group_rate, quantile, variance_momentum, mixup_alpha: η of ``group-dro``, α of ``eqrm``, γ of ``fishr``, α of
            ``mixup``.
        representation: name of the linear layer whose input is the representation of ``dann``, ``coral`` and ``mmd``,
            and which is the head of ``fishr``; None takes the last one.
        autocast: the dtype in which layers compute.

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
        case "group-dro":
            return GroupDRO(loss, group_rate, autocast)
        case "eqrm":
            return EQRM(loss, quantile, warmup_steps, autocast)
        case "fishr":
            return Fishr(loss, weight, autocast, layer=representation, momentum=variance_momentum)
        case "iga":
            return IGA(loss, weight, autocast)
        case "coral":
            return CORAL(loss, weight, autocast, layer=representation)
        case "mmd":
            return MMD(loss, weight, autocast, layer=representation)
        case "dann":
            return DANN(loss, weight, autocast, hidden_units=domain_units, layer=representation)
        case "mixup":
            return Mixup(loss, mixup_alpha, autocast)
        case "sd":
            return SpectralDecoupling(loss, weight, autocast)
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
