"""A job whose batches are dictionaries, which the model takes by keyword, not inputs and targets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.environments import Environments
from concord.training import Job, TrainConfig
from concord.training.declared_measures import Measure

WORDS = 12


def sentences(name: str) -> dict[str, Tensor]:
    """Word 1 means class 1 in all environments; the frequency of word 2 beside it differs."""
    generator = torch.Generator().manual_seed(ord(name))
    labels = torch.randint(0, 2, (60,), generator=generator)
    words = torch.randint(3, WORDS, (60, 5), generator=generator)
    words[:, 0] = torch.where(labels == 1, 1, words[:, 0])
    words[:, 1] = torch.where(torch.rand(60, generator=generator) < 0.3 * (ord(name) - ord("a")), 2, words[:, 1])
    lengths = torch.randint(2, 6, (60, 1), generator=generator)
    return {"words": words, "mask": (torch.arange(5) < lengths).long(), "labels": labels}


def environments(config: TrainConfig) -> Environments:
    return Environments(sentences, train=["a", "b", "c"], test=["d"])


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, *, words: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weights = mask[..., None].float()
        logits = self.head((self.vectors(words) * weights).sum(1) / weights.sum(1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def risk(model: nn.Module, batch: Mapping[str, Tensor], step: int) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def correct(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    right: Tensor = (outputs["logits"].argmax(1) == batch["labels"]).float()
    return right


job = Job(environments, lambda _: Classifier(), risk=risk, measures={"accuracy": Measure(correct, "max")})
