"""The network of the synthetic task, with two outputs or one."""

from typing import Any

from torch import nn

from concord.models import MLP, OneLogit


def network(features: int, one_logit: bool, **options: Any) -> nn.Module:
    """An MLP with LeakyReLU; ``options`` are those of :class:`~concord.models.MLP`."""
    return OneLogit(MLP(features, 1, **options)) if one_logit else MLP(features, 2, **options)
