"""Cows on grass: one data set with a shortcut that agrees with four labels of five, and in the test with one.

Appendix C.2 of the AND-mask paper argues that one data set suffices to distinguish grass from a cow, if every example
is an environment (``--per-example``): 80 % of the images of cows contain grass, all contain the cow. ``--split``
divides the same images into two environments, by whether the shortcut agrees. The images are scikit-learn's digits,
below five (a cow) and above (a camel); the shortcut is one more number.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from concord.environments import Environments
from concord.environments.collection import generator_for
from concord.environments.label_noise import misled, require_probabilities
from concord.models import MLP
from concord.models.mlp_options import MLPOptions
from concord.options import group, option_values
from concord.training import Comparison, Job, TrainConfig
from concord_jobs.digits import PIXELS, TEST, digits

CLASSES = 2


@dataclass(frozen=True, kw_only=True)
class CowGrassConfig(TrainConfig):
    """Images of two animals, and a background that agrees with the animal most of the time."""

    # fmt: off
    grass: float = 0.8
    """Probability that the background agrees with the animal."""
    test_grass: float = 0.2
    """Probability that the background agrees with the animal in the test."""
    split: bool = False
    """Train on two environments: images whose background agrees, and images whose background does not."""
    mlp: MLPOptions = group(MLPOptions)
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        super().check()
        require_probabilities(grass=self.grass, test_grass=self.test_grass)


def environments(config: CowGrassConfig) -> Environments:
    """``all`` images, or those whose background ``agrees`` and ``differs``; and ``ood``."""
    images, digit = digits()
    animals, seed = (digit < 5).long(), config.run.seed
    order = torch.randperm(len(animals), generator=generator_for(seed, "test"))
    tests = round(TEST * len(order))
    places = {"ood": order[:tests], "all": order[tests:]}
    agreeing = {"ood": config.test_grass, "all": config.grass}
    grounds = {
        name: misled(animals[places[name]], CLASSES, 1 - agreeing[name], seed, "background", name) for name in places
    }

    def load(name: str) -> tuple[Tensor, Tensor]:
        of = name if name in places else "all"
        labels, ground = animals[places[of]], grounds[of]
        rows = torch.cat([images[places[of]], (2 * ground - 1)[:, None].float()], 1)
        if of == name:
            return rows, labels
        chosen = (ground == labels) == (name == "agrees")
        return rows[chosen], labels[chosen]

    return Environments(load, ["agrees", "differs"] if config.split else ["all"], test=["ood"])


def model(config: CowGrassConfig) -> nn.Module:
    """An MLP with LeakyReLU."""
    return MLP(PIXELS + 1, CLASSES, **option_values(config.mlp))


THRESHOLDS = (0.2, 0.4, 0.6, 0.7, 0.8)
COLUMNS = {"o.o.d.": "ood_accuracy", "training": "train_accuracy", "held out": "held_out_accuracy"}
EXAMPLES = {"per_example": True, "aggregator": "and-mask"}
SPLIT = {"split": True, "batch_size": 64}  # of each environment, so that a step has the same number of images
METHODS: dict[str, dict[str, Any]] = {
    "average": {},
    **{f"every example, τ {value:g}": {**EXAMPLES, "threshold": value} for value in THRESHOLDS},
    "average, split": SPLIT,
    "AND-mask, split": {**SPLIT, "aggregator": "and-mask", "threshold": 1.0},
    "V-REx, split": {**SPLIT, "objective": "vrex", "penalty_weight": 10.0},
}
GRASS = Comparison(METHODS, seeds=5, columns=COLUMNS, title="one data set with grass in 80 % of the images of cows")

job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=CowGrassConfig().with_options(
        epochs=100, batch_size=128, hidden_units=64, hidden_layers=1, aggregator="mean"
    ),
    reproduces="AND-mask paper: the cow and the grass of appendix C.2, which has no experiment",
    comparisons={"grass": GRASS},
)
