"""Regression with a shared direction: four examples are four environments, as in the AND-mask authors' notebook.

Each environment can be solved by a weight of its own, or by the fifth weight, which all environments share and whose
input is a tenth as large. ``concord train consistency`` finds the shared weight with the AND-mask,
``--aggregator mean`` the four others; ``concord compare consistency`` shows both on all rows and on halves of them.
``concord report consistency`` computes §2 of the paper: Fig. 1 to 4, 10 to 12 and propositions 1 to 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from concord.environments import Environments
from concord.training import Job, Report, TrainConfig
from concord_jobs.consistency.report import ConsistencyReport, report_consistency
from concord_jobs.irm_regression.job import weights

ROWS = 4


@dataclass(frozen=True, kw_only=True)
class ConsistencyConfig(TrainConfig):
    """The notebook's regression: each row of X = 3 [I | 0.1] is an environment, all targets are 1."""

    auto_aggregator = "and-mask"

    # fmt: off
    rows: tuple[int, ...] = (0, 1, 2, 3)
    """Rows of X to train on; the others are the test environments."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        right = len(self.rows) > 0 and len(set(self.rows)) == len(self.rows) and all(0 <= r < ROWS for r in self.rows)
        self.require("rows", right, f"give one or more of 0 to {ROWS - 1}, each once")


def environments(config: ConsistencyConfig) -> Environments:
    """An environment for each example; rows outside the training set are the test."""
    inputs = 3 * torch.cat([torch.eye(ROWS), torch.full((ROWS, 1), 0.1)], 1)
    names = {f"row-{row}": row for row in range(ROWS)}

    def load(name: str) -> tuple[Tensor, Tensor]:
        return inputs[names[name]].unsqueeze(0), torch.ones(1, 1)

    return Environments(
        load,
        train=[name for name, row in names.items() if row in config.rows],
        test=[name for name, row in names.items() if row not in config.rows],
    )


def model(config: ConsistencyConfig) -> nn.Module:
    """A linear map without bias; the run's seed draws its weights, 0.1 · N(0, 1)."""
    linear = nn.Linear(ROWS + 1, 1, bias=False)
    nn.init.normal_(linear.weight, std=0.1)
    return linear


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½ (output - target)², the mean over the batch."""
    return 0.5 * nn.functional.mse_loss(outputs, targets)


job = Job(
    environments=environments,
    model=model,
    loss=half_squared_error,
    # An epoch is one step, since an environment has one example. All environments must agree on a component's sign.
    config=ConsistencyConfig().with_options(
        threshold=1.0,
        rescale=False,
        vectorize="pooled",
        epochs=1000,
        batch_size=1,
        held_out=0.0,
        optimizer="sgd",
        momentum=0.0,
        lr=0.3,
        milestones=(),
        decay_per_step=0.9995,
        l2=0.01,
    ),
    criterion="train_loss",
    mode="min",
    final_measures=weights,
    report=Report(ConsistencyReport, report_consistency),
    reproduces="AND-mask paper §2 and A, propositions 1 to 3, its authors' notebook: Fig. 1, 2, 3, 4, 10, 11, 12",
    comparisons="tables.py",
)
