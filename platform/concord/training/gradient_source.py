"""How a run computes its gradients; only this module decides it.

=============================================  ===================================================================
the run                                        its gradients come from
=============================================  ===================================================================
an objective that couples environments         :class:`~concord.objectives.ObjectiveGradients`: one loss of all
every example an environment                   :class:`~concord.gradients.PerExampleGradients`: one backward pass
several processes, one environment in each     :class:`~concord.gradients.HookedGradients`: a hook of DDP
all others                                     :class:`~concord.gradients.StackedGradients`: one vectorized pass
=============================================  ===================================================================

All of them are called ``source(batch, step)``. Several batches of an environment before an update
(``--steps-per-update``) count as several environments.
"""

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn

from concord.aggregation import Rule
from concord.gradients import (
    AggregationOptions,
    Batch,
    ExampleGradient,
    GradientSource,
    HookedGradients,
    PerExampleGradients,
    Risk,
    StackedGradients,
)
from concord.gradients.layout import trainable
from concord.gradients.pieces import Pieces
from concord.gradients.risk import MeanRisk, take
from concord.gradients.stacked import Vectorize
from concord.objectives import Objective, ObjectiveGradients
from concord.training.compiled_risk import compiled_risk, warn_uncompiled


def gradient_source(
    model: nn.Module,
    objective: Objective,
    rule: Rule,
    names: Sequence[str],
    group: dist.ProcessGroup | None = None,
    *,
    first_batch: Callable[[], Batch],
    example_gradient: ExampleGradient | None = None,
    vectorize: Vectorize | None = None,
    accumulate: int = 1,
    **options: Unpack[AggregationOptions],
) -> GradientSource:
    """The source of a run's gradients, as the table says; called in every process of the group (None: this one alone).

    ``names`` are the environments of this process at a step. ``first_batch`` returns the run's first batch, leaves
    ``(environments, batch, ...)``. It and the model's current weights decide how gradients are computed, so a resumed
    run must pass the same. ``example_gradient`` is None unless every example is an environment. ``accumulate`` is the
    number of pieces of an environment's batch. With ``compile`` the model is compiled, too, if it can be and each
    environment has a pass of its own; otherwise a warning says why not.
    """
    compiles = options.get("compile", False)
    if objective.coupled:
        return ObjectiveGradients(model, objective, names, group, **options)
    if example_gradient is not None:
        if compiles:
            warn_uncompiled("every example is an environment, which hooks on its layers watch")
        return PerExampleGradients(
            model,
            objective.risk,
            rule,
            definition=example_gradient,
            group=group,
            accumulate=accumulate,
            **options,
        )

    risk, alone = objective.risk, len(names) == 1 or vectorize is False

    def piece() -> Batch:
        return Pieces(model.train(), accumulate).of(take(first_batch(), 0))[0]

    if compiles and alone:
        risk = compiled_risk(model, risk, piece(), options.get("autocast"))
    elif compiles:
        warn_uncompiled("its environments share a pass; give --vectorize one-by-one, or a worker for each environment")
    if group is not None and set(_all_gather(len(names), group)) == {1}:
        unused = any(_all_gather(_some_parameter_is_unused(model, objective.risk, piece()), group))
        return HookedGradients(
            model,
            risk,
            rule,
            environment=names[0],
            find_unused_parameters=unused,
            accumulate=accumulate,
            **options,
        )
    stacked = StackedGradients(
        model, risk, rule, names=names, group=group, vectorize=vectorize, accumulate=accumulate, **options
    )
    if len(names) > 1 and vectorize is not False:
        model.train()
        stacked.choose(first_batch())
    return stacked


def _some_parameter_is_unused(model: nn.Module, risk: Risk, batch: Batch) -> bool:
    """Whether the risk leaves a parameter without a gradient, which DDP must know."""
    parameters = list(trainable(model).values())
    value, _ = MeanRisk(model.eval(), risk, None, parameters[0].device)(batch, 0)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    return any(gradient is None for gradient in gradients)


def _all_gather(own: int, group: dist.ProcessGroup) -> list[int]:
    gathered = [0] * dist.get_world_size(group)
    dist.all_gather_object(gathered, int(own), group=group)
    return gathered
