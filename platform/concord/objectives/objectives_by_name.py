"""The objectives by the names that the command line and configurations use."""

import inspect
from typing import Any, Literal, get_args

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
from concord.objectives.irm import IRMv1
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
# The options, and the arguments that they set. The weight has the warm-up of its penalty.
_ARGUMENTS = {
    "penalty_weight": "weight",
    "penalty_warmup": "warmup",
    "penalty_estimator": "estimator",
    "representation": "layer",
    "domain_units": "hidden_units",
    "group_rate": "rate",
    "quantile": "quantile",
    "variance_momentum": "momentum",
    "mixup_alpha": "alpha",
    "inner_lr": "inner_lr",
    "inner_steps": "inner_steps",
    "drop_grad": "drop_grad",
    "outer_environments": "outer",
    "first_order": "first_order",
    "same_environment": "same_environment",
}


def objective_type(name: str) -> type[Objective]:
    """The class of the objective called ``name``, whose attributes are ``coupled`` and ``default_weight``.

    Raises:
        ArgumentError: no objective has this name.
    """
    if name not in _TYPES:
        raise ArgumentError("objective", name, f"must be one of {', '.join(OBJECTIVES)}")
    return _TYPES[name]


def options_of(name: str) -> dict[str, str]:
    """The options that the objective called ``name`` uses, each with the argument of the class that takes it."""
    taken = inspect.signature(objective_type(name)).parameters.keys() - {"loss", "autocast"}
    taken |= {"warmup"} if "weight" in taken else set()
    return {option: argument for option, argument in _ARGUMENTS.items() if argument in taken}


def objective(
    name: str,
    loss: Loss | Risk,
    *,
    penalty_weight: float | None = None,
    warmup_steps: int = 0,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Objective:
    """The objective called ``name``; options of other objectives are ignored.

    Args:
        name: the objective's name.
        loss: the loss or the risk of one environment.
        penalty_weight: the weight of the penalty, λ, β of ``vrex``, -λ_min of ``mm-rex``; None takes the objective's
            ``default_weight``.
        warmup_steps: steps before the penalty has its weight.
        autocast: the dtype in which layers compute.
        options: the options of :class:`~concord.training.options.ObjectiveOptions` by name.

    Raises:
        InputError: no objective has this name, or an option is out of its range.
        TypeError: no objective has an option of this name.
    """
    if unknown := options.keys() - _ARGUMENTS.keys():
        raise TypeError(f"objective() got an unexpected keyword argument {min(unknown)!r}")
    kind, used = objective_type(name), options_of(name)
    arguments = {used[option]: value for option, value in options.items() if option in used}
    if "penalty_weight" in used:
        default = kind.default_weight or 0.0
        arguments["weight"] = PenaltyWeight(default if penalty_weight is None else penalty_weight, warmup_steps)
    elif "penalty_warmup" in used:
        arguments["warmup"] = warmup_steps
    return kind(loss, autocast=autocast, **arguments)
