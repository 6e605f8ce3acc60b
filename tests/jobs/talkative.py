"""A job that logs and warns while it loads its data, with slow steps."""

import logging
import time
import warnings
from dataclasses import dataclass

import torch

from concord.environments import Environments
from concord.space import LogUniform, Space
from concord.training import Job, Study, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """Four small environments."""

    pause: float = 0.0
    """Seconds that a step takes longer."""


def environments(config: Config) -> Environments:
    def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        logging.getLogger("talkative").info("loading %s", name)
        warnings.warn(f"{name} is small", stacklevel=1)
        generator = torch.Generator().manual_seed(ord(name))
        inputs = torch.randn(60, 4, generator=generator)
        return inputs, (inputs[:, 0] > 0).long()

    return Environments(load, train=["a", "b", "c", "d"], test=["e"])


class Slow(torch.nn.Linear):
    """A linear model that sleeps in each step."""

    pause = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.pause)
        return super().forward(inputs)


def model(config: Config) -> torch.nn.Module:
    layer = Slow(4, 2)
    layer.pause = config.pause
    return layer


job = Job(
    environments=environments,
    model=model,
    loss=torch.nn.functional.cross_entropy,
    config=Config().with_options(epochs=2, batch_size=16, held_out=0.2),
    studies={"rates": Study(Space({"lr": LogUniform(1e-3, 1.0)}))},
)
