"""A job whose training is next to nothing: what a trial of it costs is what a trial costs."""

from dataclasses import dataclass

import torch

from concord.environments import Environments
from concord.space import LogUniform, OneOf, Space, Uniform
from concord.training import Job, Study, TrainConfig


@dataclass(frozen=True, kw_only=True)
class TrivialConfig(TrainConfig):
    """Two environments of 64 examples, one epoch of one step."""

    # fmt: off
    shift: float = 0.0
    """Added to the inputs."""
    # fmt: on


def environments(config: TrivialConfig) -> Environments:
    """Linearly separable data, drawn anew for each environment."""
    generator = torch.Generator().manual_seed(0)
    data = {}
    for name in ("a", "b", "test"):
        inputs = torch.randn(64, 4, generator=generator)
        data[name] = (inputs, (inputs[:, 0] > 0).long())
    return Environments.from_arrays(data, test=["test"])


def model(config: TrivialConfig) -> torch.nn.Module:
    """One layer."""
    return torch.nn.Linear(4, 2)


job = Job(
    environments=environments,
    model=model,
    loss=torch.nn.functional.cross_entropy,
    config=TrivialConfig().with_options(epochs=1, aggregator="mean"),
    studies={
        "all": Study(
            Space(
                {
                    "shift": Uniform(-1.0, 1.0),
                    "lr": LogUniform(1e-4, 1.0),
                    "penalty": OneOf({"none": {"l2": 0.0}, "l2": {"l2": LogUniform(1e-5, 1e-2)}}),
                }
            )
        )
    },
)
