"""DomainBed's ColoredMNIST: a colour that agrees with the class by 90 and 80 %, and in a third environment by 10 %.

Arjovsky et al., Invariant Risk Minimization, 2019, as Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization,
2021, make it from all 70,000 digits. Each environment is left out once. The job ``colored-mnist`` has the environments
and the training of the IRM paper.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from concord.environments import Environments
from concord.environments.label_noise import misled
from concord.training import Job, TrainConfig
from concord_jobs.domainbed.small_images import SETTINGS, all_but, dealt, network
from concord_jobs.domainbed.spaces import SMALL_IMAGES
from concord_jobs.domainbed.tables import table

FLIPS = {"flip-0.1": 0.1, "flip-0.2": 0.2, "flip-0.9": 0.9}  # DomainBed's +90%, +80% and -90%
NOISE = 0.25


@dataclass(frozen=True, kw_only=True)
class DomainBedColoredMNISTConfig(TrainConfig):
    """Coloured digits of two environments, and of a third for the test."""

    # fmt: off
    test_environment: Literal["flip-0.1", "flip-0.2", "flip-0.9", "none"] = "flip-0.9"
    """Environment to test on; none trains on all three."""
    # fmt: on


def environments(config: DomainBedColoredMNISTConfig) -> Environments:
    """An environment for each agreement of colour and class."""
    seed = config.run.seed

    def coloured(name: str) -> tuple[Tensor, Tensor]:
        """Images ``(rows, 2, 28, 28)`` uint8, whose channel is the colour, and noisy labels."""
        images, digits = dealt(config.data.data, seed, list(FLIPS).index(name), len(FLIPS))
        labels = misled((digits < 5).long(), 2, NOISE, seed, name, "noise")
        colours = misled(labels, 2, FLIPS[name], seed, name, "colours")
        found = torch.zeros(len(labels), 2, *images.shape[1:], dtype=torch.uint8)
        found[torch.arange(len(labels)), colours] = images
        return found, labels

    return all_but(coloured, list(FLIPS), config.test_environment)


def model(config: DomainBedColoredMNISTConfig) -> nn.Module:
    """DomainBed's network for small images."""
    return network(2, 2)


job = Job(
    environments,
    model,
    nn.functional.cross_entropy,
    config=DomainBedColoredMNISTConfig().with_options(**SETTINGS, epochs=4),
    studies=SMALL_IMAGES,
    reproduces="DomainBed: ColoredMNIST, with a fifth of its steps",
    comparisons={
        "domainbed": table(
            "ColoredMNIST", "test_environment", list(FLIPS), {"ERM": "71.7 72.9 10.0", "GroupDRO": "73.1 73.2 10.0"}
        )
    },
)
