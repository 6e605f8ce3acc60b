"""Which examples train a student, and which judge its teacher."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from concord.distillation import Parts, inner_outer
from concord.environments import Environments

Examples = Callable[[Any, str], tuple[Tensor, Tensor]]
"""From the options, and ``train``, ``validation`` or ``test``: inputs, and targets with x*."""


def training_parts(config: Any, examples: Examples) -> Parts:
    """What trains the student, and what judges the teacher, where that is always the same."""
    fraction = config.teaching.validation_fraction
    return inner_outer(examples(config, "train"), fraction, config.run.seed, config.data.batch_size)


def student_environments(config: Any, examples: Examples, version: str | None = None) -> Environments:
    """One environment to train on; only with a fixed split some of its examples are not the student's."""

    def load(name: str) -> Any:
        split = config.teaching.fixed_split and name == "train"
        return training_parts(config, examples).inner if split else examples(config, name)

    return Environments(load, ["train"], ["validation"], ["test"], version=version)
