"""Example 1 of the IRM paper: regression on a cause and on an effect of the target, as in the IRM tutorial.

``concord train irm-regression`` is the tutorial's run with the penalty, ``--objective erm`` the one without.
``concord compare irm-regression`` runs both over seeds, and reports the weights, and the errors beside the best
possible ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from concord.environments import Environments
from concord.training import Job, TrainConfig
from concord_jobs.irm_regression.data import linear_example


@dataclass(frozen=True, kw_only=True)
class RegressionConfig(TrainConfig):
    """Example 1 of the IRM paper with the tutorial's settings: a linear model from ones, whole batches, SGD."""

    # fmt: off
    train_sigmas: tuple[float, ...] = (0.1, 1.0)
    """Standard deviation of the noise in each training environment."""
    test_sigmas: tuple[float, ...] = (0.01, 0.1, 1.0)
    """Standard deviation of the noise in each test environment."""
    examples: int = 10_000
    """Number of examples of each environment."""
    dimensions: int = 2
    """Number of dimensions of the cause, and of the effect."""
    # fmt: on


def environments(config: RegressionConfig) -> Environments:
    """The training environments; monitored are the tests and, a second time, the training data."""
    return linear_example(config.train_sigmas, config.test_sigmas, config.examples, config.dimensions, config.run.seed)


def model(config: RegressionConfig) -> nn.Module:
    """A linear map without bias, all ones."""
    linear = nn.Linear(2 * config.dimensions, 1, bias=False)
    nn.init.ones_(linear.weight)
    return linear


def weights(config: TrainConfig, trained: nn.Module) -> Mapping[str, float]:
    """The learned weights by index."""
    assert isinstance(trained, nn.Linear)
    return {f"weight_{place}": value for place, value in enumerate(trained.weight[0].tolist())}


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.mse_loss,
    # The tutorial instead multiplies the error by 1e-5, sums its two environments, and has a learning rate of 1e-3.
    # An epoch is one step: every batch is the whole data, in another order.
    config=RegressionConfig().with_options(
        objective="irm",
        penalty_weight=1e5,
        penalty_estimator="halves",
        epochs=50_000,
        batch_size=10_000,
        held_out=0.0,
        optimizer="sgd",
        momentum=0.0,
        lr=2e-3,
        milestones=(),
    ),
    criterion="train_loss",
    mode="min",
    final_measures=weights,
    reproduces="IRM tutorial: Example 1 (regression on a cause and an effect)",
    comparisons="tables.py",
)
