"""A table from three sites with one column that misleads elsewhere: breast tumours, benign or malignant.

The 30 columns are scikit-learn's Wisconsin data, standardized. Labels are wrong with probability η. One more column
agrees with the labels, except in the test, more often than any model without this column can. Three environments are
too few for a vote by sign: ``concord compare tumours`` has objectives beside the AND-mask.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from concord.environments import Environments
from concord.environments.collection import generator_for
from concord.environments.label_noise import misled, require_probabilities
from concord.errors import ArgumentError
from concord.models import MLP
from concord.models.mlp_options import MLPOptions
from concord.options import OptionGroup, group, option_values
from concord.training import Comparison, Job, TrainConfig

COLUMNS, CLASSES = 30, 2
TEST = 0.3  # of the rows


@dataclass(frozen=True, kw_only=True)
class SpuriousColumn(OptionGroup):
    """Sites of a table with a further column that misleads: what Colored MNIST does with colours, for any table."""

    # fmt: off
    flips: tuple[float, ...] = (0.05, 0.1, 0.15)
    """Probability p_e that the column misleads, for each training site."""
    validation_flip: float = 0.5
    """Probability that the column misleads in the validation environment; with 0.5 it has no information."""
    test_flip: float = 0.9
    """Probability that the column misleads in the test."""
    noise: float = 0.2
    """Probability η of a wrong label."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        require_probabilities(**option_values(self))

    def environments(self, rows: Tensor, targets: Tensor, seed: int) -> Environments:
        """The environments ``site-0 …``, ``validation``, which has as many rows as a site, and ``ood``."""
        order = torch.randperm(len(targets), generator=generator_for(seed, "sites"))
        tests, sites = round(TEST * len(order)), [f"site-{index}" for index in range(len(self.flips))]
        if not 1 <= len(sites) < len(order) - tests - 1:
            raise ArgumentError("flips", self.flips, "give a probability for each training environment")
        flips = dict(zip(["validation", *sites], [self.validation_flip, *self.flips], strict=True))
        parts = {name: order[tests:][place :: len(flips)] for place, name in enumerate(flips)}
        parts["ood"], flips["ood"] = order[:tests], self.test_flip

        def load(name: str) -> tuple[Tensor, Tensor]:
            labels = misled(targets[parts[name]], 2, self.noise, seed, "labels", name)
            column = misled(labels, 2, flips[name], seed, "column", name)
            return torch.cat([rows[parts[name]], (2 * column - 1)[:, None].float()], 1), labels

        return Environments(load, sites, ["validation"], ["ood"])


@dataclass(frozen=True, kw_only=True)
class TumoursConfig(TrainConfig):
    """Tumours at three sites, with a column that misleads seldom there and often in the test."""

    auto_aggregator = "and-mask"

    sites: SpuriousColumn = group(SpuriousColumn)
    mlp: MLPOptions = group(MLPOptions)


@functools.lru_cache(maxsize=1)
def tumours() -> tuple[Tensor, Tensor]:
    """Columns ``(569, 30)`` of mean 0 and deviation 1, and classes, read once a process."""
    data = load_breast_cancer()
    columns = torch.from_numpy(data.data)
    return ((columns - columns.mean(0)) / columns.std(0)).float(), torch.from_numpy(data.target).long()


def environments(config: TumoursConfig) -> Environments:
    """The sites, a validation site, and the test."""
    return config.sites.environments(*tumours(), config.run.seed)


def model(config: TumoursConfig) -> nn.Module:
    """An MLP with LeakyReLU."""
    return MLP(COLUMNS + 1, CLASSES, **option_values(config.mlp))


AVERAGE = {"aggregator": "mean"}
# The rows differ only in these options.
METHODS: dict[str, dict[str, Any]] = {
    "and-mask": {},
    "momentum by environment": {"environment_momentum": 0.9},
    "4 steps an update": {"threshold": 1.0, "steps_per_update": 4},
    "geometric-mean": {"aggregator": "geometric-mean"},
    "sand-mask": {"aggregator": "sand-mask"},
    "t-mask": {"aggregator": "t-mask", "environment_momentum": 0.9},
    "vrex": {"objective": "vrex", "penalty_weight": 100.0, "penalty_warmup": 0.2, **AVERAGE},
    "irm": {"objective": "irm", "penalty_weight": 100.0, "penalty_warmup": 0.2, **AVERAGE},
    "mean": AVERAGE,
}
RULES = Comparison(
    {method: {**options, "evaluations": 1} for method, options in METHODS.items()},
    seeds=5,
    first_seed=101,
    columns={"o.o.d.": "ood_accuracy", "validation": "validation_accuracy", "held out": "held_out_accuracy"},
    title="three sites and one column that misleads",
)

job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=TumoursConfig().with_options(epochs=100, batch_size=64, hidden_units=32, l2=1e-2),
    criterion="validation_accuracy",
    reproduces="no paper's result: a table with three environments and one column that misleads",
    comparisons={"rules": RULES},
)
