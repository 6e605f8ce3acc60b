"""The split of examples into those that train a student and those that judge its teacher."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from concord.distillation import Parts, inner_outer
from concord.environments import Environments

Examples = Callable[[Any, str], tuple[Tensor, Tensor]]
"""A function of the options and ``train``, ``validation`` or ``test`` to inputs, and targets with x*."""


def training_parts(config: Any, examples: Examples) -> Parts:
    """The examples that train the student, and those that judge the teacher, for a fixed split."""
    fraction = config.teaching.validation_fraction
    return inner_outer(examples(config, "train"), fraction, config.run.seed, config.data.batch_size)


def student_environments(config: Any, examples: Examples, version: str | None = None) -> Environments:
    """One training environment; with a fixed split it has only the student's examples."""

    def load(name: str) -> Any:
        split = config.teaching.fixed_split and name == "train"
        return training_parts(config, examples).inner if split else examples(config, name)

    return Environments(load, ["train"], ["validation"], ["test"], version=version)
