"""A job for studies of many short trials: three small environments, and options that make a trial fail."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from concord.environments import Environments
from concord.space import Choice, LogUniform, OneOf, Space, Uniform
from concord.training import Job, Study, TrainConfig

EXAMPLES = 60


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """Three small environments."""

    width: int = 4
    """Numbers in an example, of which two count."""
    pause: float = 0.0
    """Seconds that a step takes longer, so that a test can interfere."""
    broken: Literal["no", "raises", "exits", "dies", "grows"] = "no"
    """What becomes of a training."""
    misshapen: str = ""
    """Environment whose data do not fit those of the others."""
    witness: Path | None = None
    """File that gets a line for every training: the number of its process."""


def environments(config: Config) -> Environments:
    def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(ord(name))
        inputs = torch.randn(EXAMPLES, config.width, generator=generator)
        noise = 0.3 * torch.randn(EXAMPLES, generator=generator)
        targets = (inputs[:, 0] + inputs[:, 1] + noise > 0).long()
        return inputs[:, 1:] if name == config.misshapen else inputs, targets

    return Environments(load, train=["a", "b", "c"], test=["d"])


class Linear(torch.nn.Linear):
    """A linear model whose steps can be slow."""

    pause = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.pause)
        return super().forward(inputs)


def model(config: Config) -> torch.nn.Module:
    if config.broken == "raises":
        raise ArithmeticError("this model cannot be made")
    if config.broken == "exits":
        raise SystemExit("this model cannot be made")
    if config.broken == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.broken == "grows":
        kept = []
        while sum(map(len, kept)) < 6_000_000_000:
            kept.append(bytearray(b"x") * 50_000_000)
            time.sleep(0.05)
    if config.witness is not None:
        with config.witness.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
    layer = Linear(config.width, 2)
    layer.pause = config.pause
    return layer


masked = Space(
    {
        "lr": LogUniform(1e-3, 1.0),
        "threshold": Uniform(0.0, 1.0),
        "penalty": OneOf({"none": {"l2": 0.0}, "l2": {"l2": LogUniform(1e-4, 1e-1)}}),
    }
)
averaged = Space({"aggregator": "mean", "lr": LogUniform(1e-3, 1.0)})
fragile = Space({"broken": Choice("no", "raises", "exits", "dies"), "lr": Choice(0.03, 0.3)})

job = Job(
    environments=environments,
    model=model,
    loss=torch.nn.functional.cross_entropy,
    # Not timed, so that a trial is the same everywhere, to the last bit.
    config=Config().with_options(epochs=2, batch_size=16, held_out=0.2, vectorize="vmap"),
    studies={"masked": Study(masked), "averaged": Study(averaged), "fragile": Study(fragile)},
)
