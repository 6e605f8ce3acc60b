"""The objectives by the names that the command line and configurations use.

A new objective is its file, a line in :mod:`concord.built_in`, and its arguments as options in
:class:`~concord.training.options.ObjectiveOptions`. Its class says how they are called, how it is shown, and what
``compare methods`` searches.
"""

from typing import Any

import torch

from concord import built_in
from concord.gradients.risk import Loss, Risk
from concord.hyperparameters import options_of_part
from concord.objectives.objective import Objective
from concord.objectives.penalty_weight import PenaltyWeight

OBJECTIVES: dict[str, type[Objective]] = built_in.OBJECTIVES.kinds()


def objective_type(name: str) -> type[Objective]:
    """The class of the objective called ``name``, whose attributes are ``coupled`` and ``default_weight``.

    Raises:
        ArgumentError: no objective has this name.
    """
    return built_in.OBJECTIVES.kind(name)


def used_options(name: str) -> set[str]:
    """The options that the objective called ``name`` uses; a weight has the warm-up of its penalty."""
    used = {*options_of_part(objective_type(name))}
    return used | ({"penalty_warmup"} if "penalty_weight" in used else set())


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
    kind = objective_type(name)
    if unknown := options.keys() - built_in.OBJECTIVES.all_options().keys():
        raise TypeError(f"objective() got an unexpected keyword argument {min(unknown)!r}")
    arguments = options_of_part(kind)
    given = {arguments[option].name: value for option, value in options.items() if option in arguments}
    if "penalty_weight" in arguments:
        default = kind.default_weight or 0.0
        given["weight"] = PenaltyWeight(default if penalty_weight is None else penalty_weight, warmup_steps)
    elif "penalty_warmup" in arguments:
        given["warmup"] = warmup_steps
    return kind(loss, autocast=autocast, **given)
