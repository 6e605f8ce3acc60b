"""Parameters that have no real gradient are refused where a model enters the gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask
from concord.errors import InputError
from concord.gradients import PerExampleGradients, StackedGradients, per_example

SOURCES: dict[str, Callable[[nn.Module], Any]] = {
    "StackedGradients": lambda model: StackedGradients(model, cross_entropy, AndMask(0.5)),
    "per_example": lambda model: per_example(model, AndMask(0.5)),
    "PerExampleGradients": lambda model: PerExampleGradients(model, cross_entropy, AndMask(0.5)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_complex_parameter_or_one_without_values_is_refused_by_name(source: str) -> None:
    complex_one = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(InputError, match=r"^parameter 1\.weight: is complex \(torch\.complex64\), and gradients must"):
        SOURCES[source](complex_one)
    with pytest.raises(InputError, match=r"^parameter weight: is on the device meta, without values; call model\.to_e"):
        SOURCES[source](nn.Linear(2, 2, device="meta"))
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64).requires_grad_(False))
    SOURCES[source](frozen)
