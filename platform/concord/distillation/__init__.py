"""Learning to distill trajectories: a teacher sees privileged information, and learns targets for a student.

A student maps an input x to a label. A teacher sees privileged information x*, which is available only in training,
such as the events after x. It computes targets for the student's layers, h* = T(x*). The student's training loss is

    label loss + α Σ_k L_t(h_k, h*_k).

Useful targets are unknown in advance, so the teacher learns them: a copy of the student takes n steps on that loss, and
the label loss on examples that the copy was not trained on is differentiated through all n steps with respect to the
teacher. Then the student takes N steps with the new teacher, and so on.

Parts that are combined:

=================  ====================================================================================
:class:`Teaching`  α, the layers that are taught, and how a target and an activation are compared
teacher            any module from x* to targets
a rule             :class:`SGD` or :class:`Adam`, the steps of the copy; by default the run's optimizer
:class:`MetaLearning`  n, N, the teacher's optimizer, and the examples that judge it; None: it is fixed
=================  ====================================================================================

:class:`Distillation` combines them to an objective of a job. :func:`meta_gradient` is the derivative alone, for any
loop, and with :class:`Stacked` networks for several seeds at once. :class:`AuxiliaryPrediction` is the baseline: the
student predicts x*.
"""

from concord.distillation.auxiliary import AuxiliaryPrediction
from concord.distillation.combination import MetaSums
from concord.distillation.distillation import Distillation, MetaLearning
from concord.distillation.meta_gradient import MetaGradient, meta_gradient
from concord.distillation.privileged import Parts, inner_outer, of_labels, privileged_of, with_privileged
from concord.distillation.seeds import Stacked, StackedStudent, side_by_side
from concord.distillation.student import Student
from concord.distillation.teacher_options import TeacherOptions
from concord.distillation.teaching import GatedError, Teaching, divergence, squared_error
from concord.distillation.unrolled import SGD, Adam, OptimizerState, Rule, as_rule

__all__ = [
    "SGD",
    "Adam",
    "AuxiliaryPrediction",
    "Distillation",
    "GatedError",
    "MetaGradient",
    "MetaLearning",
    "MetaSums",
    "OptimizerState",
    "Parts",
    "Rule",
    "Stacked",
    "StackedStudent",
    "Student",
    "TeacherOptions",
    "Teaching",
    "as_rule",
    "divergence",
    "inner_outer",
    "meta_gradient",
    "of_labels",
    "privileged_of",
    "side_by_side",
    "squared_error",
    "with_privileged",
]
