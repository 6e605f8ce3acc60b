"""Objectives across environments: what is minimized, where aggregators say how gradients are combined.

Each is a function of a model and of a batch of each environment, for any loop::

    IRMv1(cross_entropy, PenaltyWeight(1e4, warmup=100))(model, inputs, targets, step).backward()

:class:`ERM` and :class:`IRMv1` average a term an environment, so any aggregator can take the average's place: their
``term`` is the loss that a gradient source of :mod:`concord.gradients` takes. The others couple environments;
:class:`ObjectiveGradients` computes their gradient, over several processes too.
"""

from concord.objectives.dann import DANN, DomainAdversarial, reverse_gradient
from concord.objectives.erm import ERM
from concord.objectives.gradients import ObjectiveGradients
from concord.objectives.irm import Estimator, IRMv1, irm_penalty
from concord.objectives.meta_irm import MetaIRM
from concord.objectives.mm_rex import MMREx
from concord.objectives.objective import Objective, Separable
from concord.objectives.penalty_weight import PenaltyWeight
from concord.objectives.selection import COUPLED, OBJECTIVES, ObjectiveName, default_penalty_weight, objective
from concord.objectives.vrex import VREx

__all__ = [
    "COUPLED",
    "DANN",
    "ERM",
    "OBJECTIVES",
    "DomainAdversarial",
    "Estimator",
    "IRMv1",
    "MMREx",
    "MetaIRM",
    "Objective",
    "ObjectiveGradients",
    "ObjectiveName",
    "PenaltyWeight",
    "Separable",
    "VREx",
    "default_penalty_weight",
    "irm_penalty",
    "objective",
    "reverse_gradient",
]
