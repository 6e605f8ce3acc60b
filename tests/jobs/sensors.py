"""Predict rain from the weather and a sensor, which is 1 for rain in seven stations and reversed in four."""

import torch

from concord.environments import Environments
from concord.environments.collection import generator_for
from concord.training import Job, TrainConfig

TRAIN, REVERSED = list("abcdefgh"), "hvwt"


def environments(config: TrainConfig) -> Environments:
    """The weather is right in three of four cases everywhere; the sensor is wrong in the last training station."""

    def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        weather, noise = torch.randn(2, 200, generator=generator_for(config.run.seed, "sensors", name))
        rain = (weather + noise > 0).long()
        return torch.stack([weather, (-1.0 if name in REVERSED else 1.0) * (2.0 * rain - 1)], 1), rain

    return Environments(load, train=TRAIN, validation=["v", "w"], test=["t"])


def model(config: TrainConfig) -> torch.nn.Module:
    """A linear model with zero weights."""
    linear = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(linear.weight)
    return linear


job = Job(
    environments=environments,
    model=model,
    loss=torch.nn.functional.cross_entropy,
    config=TrainConfig().with_options(lr=0.1, epochs=10, batch_size=50, evaluations=5, vectorize="vmap"),
)
