"""Example 1 of the IRM paper: a cause and an effect of the target, with noise that differs between environments."""

import torch
from torch import Tensor

from concord.environments import Environments
from concord.environments.collection import generator_for
from concord.errors import ArgumentError


def linear_example(
    train: tuple[float, ...] = (0.1, 1.0),
    test: tuple[float, ...] = (0.01, 0.1, 1.0),
    examples: int = 10_000,
    dimensions: int = 2,
    seed: int = 0,
) -> Environments:
    """Environments with noise of standard deviation σ each (Arjovsky et al., Invariant Risk Minimization, 2019).

    X ~ N(0, σ²), Y = X + N(0, σ²), Z = Y + N(0, 1), each with ``dimensions`` numbers. The inputs are X and Z, the
    target is the sum of Y's numbers. Only X causes the target: the least error that holds in all environments, 2σ² in
    2 dimensions, is that of the weights 1 on X and 0 on Z. The monitored environments are the tests and, a second time,
    the training data.
    """
    for option, value in (("examples", examples), ("dimensions", dimensions)):
        if value < 1:
            raise ArgumentError(option, value, "must be at least 1")
    for option, sigmas in (("train_sigmas", train), ("test_sigmas", test)):
        if not sigmas or min(sigmas) <= 0:
            raise ArgumentError(option, tuple(sigmas), "give standard deviations above 0")
        if len({f"{sigma:g}" for sigma in sigmas}) < len(sigmas):
            raise ArgumentError(option, tuple(sigmas), "is the same in two environments; give different ones")
    named = {f"train-{sigma:g}": sigma for sigma in train}
    monitored = {f"seen-{sigma:g}": f"train-{sigma:g}" for sigma in train}
    tests = {f"test-{sigma:g}": sigma for sigma in test}

    def load(name: str) -> tuple[Tensor, Tensor]:
        name = monitored.get(name, name)
        sigma, generator = {**named, **tests}[name], generator_for(seed, "linear example", name)
        x, noise, other = torch.randn(3, examples, dimensions, generator=generator)
        y = x * sigma + noise * sigma
        return torch.cat([x * sigma, y + other], 1), y.sum(1, keepdim=True)

    return Environments(load, named, monitored=[*monitored, *tests])
