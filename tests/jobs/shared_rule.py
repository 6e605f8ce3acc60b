"""A job as written by a user: three hospitals with different scanners, and one rule that holds in all."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch

from concord.environments import Environments, ExampleSource, InMemory
from concord.errors import InputError
from concord.storage import append_line
from concord.training import Job, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """Three hospitals."""

    trouble: str = ""
    """What is wrong with the data of hospital c, for tests."""
    pause: float = 0.0
    """Seconds that a batch takes longer, so that a test can interfere."""


class Unreadable(ExampleSource):
    """Examples that can be read until the second batch of a training."""

    def __init__(self, examples: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.examples, self.batches = InMemory(examples), 0

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, examples: slice | torch.Tensor, draw: torch.Tensor | None = None) -> Any:
        self.batches += draw is not None
        if self.batches > 1:
            raise InputError("environment c: an example cannot be read")
        return self.examples.take(examples)


def environments(config: Config) -> Environments:
    def load(name: str) -> Any:
        generator = torch.Generator().manual_seed(ord(name))
        inputs = torch.randn(80, 4, generator=generator)
        targets = (inputs[:, 0] + inputs[:, 1] > 0).long()
        if name == "c":
            if config.trouble == "bug":
                targets = targets[: 1 // (len(targets) - 80)]
            if config.trouble == "killed":
                append_line(config.run.output / "attempts", "c")
                os.kill(os.getpid(), signal.SIGKILL)
            if config.trouble == "shape":
                inputs = inputs[:, :3]
            if config.trouble == "empty":
                inputs, targets = inputs[:0], targets[:0]
            if config.trouble == "target":
                targets = targets + 1
            if config.trouble == "large":
                inputs = 1e30 * inputs
            if config.trouble == "infinite":
                inputs = torch.full_like(inputs, 3e38)  # finite, but twice that is not
            if config.trouble == "unreadable":
                return Unreadable((inputs, targets))
        return inputs, targets

    return Environments(load, train=["a", "b", "c"], test=["d"])


class Slow(torch.nn.Linear):
    pause = 0.0
    trouble = ""
    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.trouble == "exit" or (self.trouble == "late exit" and self.calls > 32):
            raise SystemExit(0)
        if self.training:
            time.sleep(self.pause)
        return super().forward(2 * inputs)


def model(config: Config) -> torch.nn.Module:
    layer = Slow(4, 2)
    layer.pause, layer.trouble = config.pause, config.trouble
    return layer


job = Job(environments=environments, model=model, loss=torch.nn.functional.cross_entropy, config=Config)
