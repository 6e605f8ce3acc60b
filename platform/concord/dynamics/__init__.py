"""Adaptive skip intervals: a model of dynamics that learns how far each of its predictions reaches.

A model f maps a frame to a later frame. A model that predicts the next frame must model every detail of the change from
frame to frame, although many details are chaotic and irrelevant later. Here a prediction is compared with the best
matching of the next H frames, and the next prediction starts there, so f may skip unpredictable frames. Neitz et al.,
Adaptive skip intervals: temporal abstraction for recurrent dynamical models, 2018, and chapter 2 of the first author's
thesis.

Parts that are combined:

==================  ===================================================================================
:class:`SkipConfig` H, or a fixed stride
:class:`Curriculum` μ and ε: the probabilities of a random target, and of a start from the data's frame
a loss              :class:`CrossEntropy` of logits, :class:`SquaredError`, or one of your own
a model             anything that maps frames to outputs of their shape
==================  ===================================================================================

:func:`unroll` is the loop alone, :class:`SkipRisk` its losses as the risk of a job, :func:`rollout` the predictions of
a trained model from one frame.
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
