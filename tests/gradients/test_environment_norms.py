"""Batch norm by environment in one pass for all gives what a pass for each environment gives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask
from concord.aggregation.asynchronous import as_asynchronous
from concord.gradients import StackedGradients

ENVIRONMENTS, EXAMPLES = 5, 4


class Normed(nn.Module):
    """Convolutions and batch norms: with and without weights, one in evaluation mode, one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Sequential(
            # The gradient of a bias before a norm would be rounding, whose signs differ.
            nn.Conv2d(2, 4, 3, 2, padding=1, groups=2, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, bias=False, padding=1),
            nn.BatchNorm2d(6, affine=False),
            nn.Tanh(),
            nn.BatchNorm2d(6, track_running_stats=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(6 * 9, 5, bias=False),
            nn.BatchNorm1d(5, momentum=0.0),
            nn.Linear(5, 3),
        )
        self.unused = nn.BatchNorm1d(3)
        self.seen[1].weight.requires_grad_(False)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.seen(images)
        return logits


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ENVIRONMENTS, EXAMPLES, 2, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 3, (ENVIRONMENTS, EXAMPLES), generator=generator)


def trained(asynchronous: bool, evaluated: int | None, **options: Any) -> tuple[nn.Module, StackedGradients]:
    torch.manual_seed(0)
    model = Normed()
    if evaluated is not None:
        model.seen[evaluated].eval()
    with as_asynchronous() if asynchronous else torch.enable_grad():
        gradients = StackedGradients(model, cross_entropy, AndMask(0.5), **options)
        for step in range(2):
            gradients(batch(), step)
    return model, gradients


@pytest.mark.parametrize("evaluated", [None, 1])
@pytest.mark.parametrize("at_once", [ENVIRONMENTS, 2])
def test_one_pass_gives_the_gradients_and_statistics_of_a_pass_for_each(at_once: int, evaluated: int | None) -> None:
    expected, _ = trained(False, evaluated, vectorize=False)
    components = sum(each.numel() for each in expected.parameters() if each.requires_grad)
    found, gradients = trained(True, evaluated, memory_limit=8 * components * at_once)
    assert gradients.vectorize == "pooled"
    for (name, parameter), other in zip(expected.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-8, atol=1e-11, msg=name)
    for (name, buffer), other in zip(expected.named_buffers(), found.named_buffers(), strict=True):
        torch.testing.assert_close(other[1], buffer, rtol=1e-9, atol=1e-12, msg=name)
    assert torch.equal(found.unused.running_var, torch.ones(3).double())
    assert all("forward" not in vars(module) for module in found.modules())


class Folded(nn.Module):
    """Folds the positions of an example into the batch: batch norm sees them as examples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(2), nn.Linear(2 * 36, 3)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        folded = self.norm(images.flatten(2).transpose(1, 2).flatten(0, 1))
        logits: Tensor = self.last(folded.unflatten(0, (len(images), -1)).flatten(1))
        return logits


@pytest.mark.parametrize("vectorize", [None, "pooled"])
def test_a_norm_of_something_other_than_the_examples_goes_the_ordinary_way(vectorize: Any) -> None:
    found = []
    for way, given in ((False, False), (True, vectorize)):
        torch.manual_seed(0)
        model = Folded()
        with as_asynchronous() if way else torch.enable_grad():
            StackedGradients(model, cross_entropy, AndMask(0.5), vectorize=given)(batch())
        found.append(model)
    for parameter, other in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-8, atol=1e-11)
