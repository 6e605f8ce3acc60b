"""Objectives across environments: the number to minimize. Aggregators combine gradients instead.

Each is a function of a model and of the environments' batches, for any loop::

    IRMv1(cross_entropy, PenaltyWeight(1e4, warmup=100))(model, inputs, targets, step).backward()

With a risk in place of the loss (:mod:`concord.gradients.risk`), batches are any tree of tensors.

:class:`ERM`, :class:`IRMv1` and :class:`SpectralDecoupling` average a term of each environment, so any aggregator can
replace the average: pass their ``risk`` to a gradient source of :mod:`concord.gradients`. The others couple
environments; :class:`ObjectiveGradients` computes their gradient, also over several processes.
"""

from concord.objectives.coral import CORAL
from concord.objectives.dann import DANN, DomainClassifier, reverse_gradient
from concord.objectives.environment_vectors import EnvironmentVectors
from concord.objectives.eqrm import EQRM
from concord.objectives.erm import ERM, WeightedERM
from concord.objectives.fishr import Fishr
from concord.objectives.gradients import ObjectiveGradients
from concord.objectives.group_dro import GroupDRO
from concord.objectives.iga import IGA
from concord.objectives.irm import Estimator, IRMv1, irm_penalty
from concord.objectives.meta_irm import MetaIRM
from concord.objectives.mixup import Mixup
from concord.objectives.mm_rex import MMREx
from concord.objectives.mmd import MMD
from concord.objectives.objective import Objective, Penalized, Rescaled
from concord.objectives.objectives_by_name import OBJECTIVES, objective, objective_type
from concord.objectives.penalty_weight import PenaltyWeight
from concord.objectives.spectral_decoupling import SpectralDecoupling
from concord.objectives.vrex import VREx

__all__ = [
    "CORAL",
    "DANN",
    "EQRM",
    "ERM",
    "IGA",
    "MMD",
    "OBJECTIVES",
    "DomainClassifier",
    "EnvironmentVectors",
    "Estimator",
    "Fishr",
    "GroupDRO",
    "IRMv1",
    "MMREx",
    "MetaIRM",
    "Mixup",
    "Objective",
    "ObjectiveGradients",
    "Penalized",
    "PenaltyWeight",
    "Rescaled",
    "SpectralDecoupling",
    "VREx",
    "WeightedERM",
    "irm_penalty",
    "objective",
    "objective_type",
    "reverse_gradient",
]
