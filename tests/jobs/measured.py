"""A job for studies judged by an error: three small environments; the last is the hardest to predict."""

from dataclasses import dataclass
from typing import Any

import torch

from concord.environments import Environments
from concord.space import LogUniform, Space
from concord.training import Job, Measure, Study, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """Three small environments, whose noise differs."""

    def derived_options(self) -> dict[str, Any]:
        own = 3 if self.objective.objective == "irm" else 2
        return super().derived_options() | {"epochs": self.schedule.epochs or own}


def environments(config: Config) -> Environments:
    def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(ord(name))
        inputs = torch.randn(50, 2, generator=generator)
        noise = (ord(name) - ord("a")) * torch.randn(50, generator=generator)
        return inputs, inputs.sum(1) + noise

    return Environments(load, train=["a", "b", "c"], test=["d"])


class Line(torch.nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)[:, 0]


def off(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs()


job = Job(
    environments=environments,
    model=lambda config: Line(2, 1),
    loss=torch.nn.functional.mse_loss,
    # 0 epochs stand for two, with irm for three. Not timed, so that a trial is the same everywhere, to the last bit.
    config=Config().with_options(epochs=0, batch_size=20, held_out=0.2, vectorize="vmap", lr=0.1),
    measures={"off": off, "distance": Measure(off, mode="min"), "closeness": Measure(lambda o, t: -off(o, t), "max")},
    studies={"rates": Study(Space({"lr": LogUniform(1e-4, 0.5)}))},
)
