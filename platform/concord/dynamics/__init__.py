"""Adaptive skip intervals: a model of dynamics that finds out itself how far each of its predictions reaches.

A model f maps a frame to a frame. What is trained to predict the next frame has to model every detail of how one
frame becomes the next; much of that is chaotic and does not matter later. Here a prediction is compared with that of
the next H frames that it matches best, and goes on from there, so that f may leave out what it cannot know. Neitz et
al., Adaptive skip intervals: temporal abstraction for recurrent dynamical models, 2018, and chapter 2 of the first
author's thesis.

Parts that are combined:

==================  ===================================================================================
:class:`SkipConfig` H, or a fixed stride
:class:`Curriculum` μ and ε: when targets are drawn at random, when the data's own frames are fed
a loss              :class:`CrossEntropy` of logits, :class:`SquaredError`, or one of your own
a model             anything that maps frames to outputs of their shape
==================  ===================================================================================

:func:`unroll` is the loop alone, :class:`SkipRisk` its losses as the risk of a job, :func:`rollout` the trained model
left to itself.
"""

from concord.dynamics.curriculum import Curriculum, staircase
from concord.dynamics.matching import CrossEntropy, FrameLoss, SquaredError, as_float, best_match
from concord.dynamics.measures import skip_measures, task_measures
from concord.dynamics.rollout import accuracies, rollout, rollout_depth
from concord.dynamics.sequences import keys, sequences
from concord.dynamics.skip_options import SkipOptions
from concord.dynamics.skip_risk import PredictionMean, SkipRisk, skip_objective
from concord.dynamics.unroll import SkipConfig, Unrolled, unroll

__all__ = [
    "CrossEntropy",
    "Curriculum",
    "FrameLoss",
    "PredictionMean",
    "SkipConfig",
    "SkipOptions",
    "SkipRisk",
    "SquaredError",
    "Unrolled",
    "accuracies",
    "as_float",
    "best_match",
    "keys",
    "rollout",
    "rollout_depth",
    "sequences",
    "skip_measures",
    "skip_objective",
    "staircase",
    "task_measures",
    "unroll",
]
