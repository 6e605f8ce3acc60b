"""Labels, marks and colours that are wrong with some probability."""

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


def shuffle_labels(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Shuffle the labels of a random part of the examples among themselves.

    Args:
        labels: ``(examples,)``.
        fraction: the part, in [0, 1].
        seed: of the part and of the order.

    Returns:
        The new labels, and a mask of those that are wrong (``(examples,)`` bool), since some keep their label.

    Raises:
        InputError: the fraction is not in [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ArgumentError("label_noise", fraction, "the fraction of shuffled labels must lie in [0, 1]")
    generator = generator_for(seed, "shuffled labels")
    chosen = torch.randperm(len(labels), generator=generator)[: round(fraction * len(labels))]
    shuffled = labels.clone()
    shuffled[chosen] = labels[chosen[torch.randperm(len(chosen), generator=generator)]]
    return shuffled, shuffled != labels
