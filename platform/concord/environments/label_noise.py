"""Shortcuts: labels, marks and colours that are wrong with some probability."""

import torch
from torch import Tensor

from concord.environments.collection import generator_for
from concord.errors import ArgumentError


def misled(labels: Tensor, classes: int, probability: float, *key: int | str) -> Tensor:
    """The labels ``(examples,)``; with this probability, drawn from the key, each is the next class instead."""
    chosen = torch.rand(len(labels), generator=generator_for(*key)) < probability
    return (labels + chosen) % classes


def require_probabilities(**options: float | tuple[float, ...]) -> None:
    """Refuse an option with a value outside [0, 1] (InputError)."""
    for option, values in options.items():
        for value in values if isinstance(values, tuple) else (values,):
            if not 0 <= value <= 1:
                raise ArgumentError(option, value, "must be a probability, in [0, 1]")
