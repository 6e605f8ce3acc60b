"""The split of examples into those that train a student and those that judge its teacher."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from concord.distillation import Parts, inner_outer
from concord.environments import Environments
from concord.environments.collection import generator_for

Examples = Callable[[Any, str], tuple[Tensor, Tensor]]
"""A function of the options and ``train``, ``validation`` or ``test`` to inputs, and targets with x*."""


def training_parts(config: Any, examples: Examples) -> Parts:
    """The examples that train the student, and those that judge the teacher, for a fixed split."""
    fraction = config.teaching.validation_fraction
    return inner_outer(examples(config, "train"), fraction, config.run.seed, config.data.batch_size)


def generator_of(config: Any, purpose: str) -> torch.Generator:
    """The generator of what a seed draws: ``train``, ``validation`` and ``test``, or ``mixing`` of the task.

    With the seed itself a generator would draw the numbers of the student's first weights.
    """
    return generator_for(config.run.seed, purpose)


def student_environments(config: Any, examples: Examples, version: str | None = None) -> Environments:
    """One training environment; with a fixed split it has only the student's examples."""

    def load(name: str) -> Any:
        split = config.teaching.fixed_split and name == "train"
        return training_parts(config, examples).inner if split else examples(config, name)

    return Environments(load, ["train"], ["validation"], ["test"], version=version)
