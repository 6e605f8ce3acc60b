"""A table from three sites with one column that misleads elsewhere: breast tumours, benign or malignant.

The 30 columns are scikit-learn's Wisconsin data, standardized; labels are wrong with η, and one more column agrees with
them more often than any honest model can, until the test. Three environments are too few for a vote by sign:
``concord compare tumours`` has objectives beside the AND-mask.
"""

import functools
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from concord.environments import Environments, SpuriousColumn
from concord.models import MLP
from concord.models.mlp_options import MLPOptions
from concord.options import option_values
from concord.training import Job, TrainConfig

COLUMNS, CLASSES = 30, 2


@dataclass(frozen=True, kw_only=True)
class TumoursConfig(TrainConfig):
    """Tumours at three sites, with a column that misleads seldom there and often in the test."""

    # fmt: off
    flips: tuple[float, ...] = (0.05, 0.1, 0.15)
    """How often the column misleads at each site, p_e."""
    validation_flip: float = 0.5
    """How often it misleads in the validation environment; .5 tells nothing."""
    test_flip: float = 0.9
    """How often it misleads in the test."""
    noise: float = 0.2
    """How often the label is wrong, η."""
    mlp: MLPOptions = field(default_factory=MLPOptions)
    # fmt: on


@functools.lru_cache(maxsize=1)
def tumours() -> tuple[Tensor, Tensor]:
    """Columns ``(569, 30)`` of mean 0 and deviation 1, and classes, read once a process."""
    data = load_breast_cancer()
    columns = torch.from_numpy(data.data)
    return ((columns - columns.mean(0)) / columns.std(0)).float(), torch.from_numpy(data.target).long()


def environments(config: TumoursConfig) -> Environments:
    """The sites, one more to validate, and the test."""
    options = {name: getattr(config, name) for name in ("flips", "validation_flip", "test_flip", "noise")}
    return SpuriousColumn(*tumours(), **options, seed=config.run.seed).as_environments()


def model(config: TumoursConfig) -> nn.Module:
    """An MLP with LeakyReLU."""
    return MLP(COLUMNS + 1, CLASSES, **option_values(config.mlp))


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=TumoursConfig().with_options(epochs=100, batch_size=64, hidden_units=32, l2=1e-2),
    criterion="validation_accuracy",
    reproduces="no paper's result: a table with three environments and one column that misleads",
    comparisons="tables/tumours.py",
)
