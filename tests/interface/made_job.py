"""A job that a program makes, for tests of the interface."""

from typing import Any

import torch
from torch import nn

import concord

SCALE = 3.0


def environments(_: Any) -> concord.Environments:
    def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(ord(name))
        inputs = torch.randn(60, 4, generator=generator)
        return inputs, (SCALE * inputs[:, 0] + inputs[:, 1] > 0).long()

    return concord.Environments(load, train=["a", "b", "c"], test=["d"])


def model(_: Any) -> nn.Module:
    return nn.Linear(4, 2)


CONFIG = concord.TrainConfig().with_options(epochs=2, batch_size=16, held_out=0.2, vectorize="vmap", lr=0.1)


def made_job(**parts: Any) -> concord.Job[Any]:
    usual = {"environments": environments, "model": model, "loss": nn.functional.cross_entropy, "config": CONFIG}
    return concord.Job(**{**usual, "name": "made", **parts})
