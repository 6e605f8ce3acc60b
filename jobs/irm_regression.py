"""Example 1 of the IRM paper: regression on a cause and on an effect of the target, as in the IRM tutorial.

``concord train irm-regression`` is the tutorial's run with the penalty, ``--objective erm`` the one without;
``concord report irm-regression`` both over seeds: the weights, the errors beside the best possible, the correlations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from concord.analysis.figures import save
from concord.analysis.regression_figures import histograms
from concord.analysis.spread import with_spread
from concord.environments import Environments, linear_example
from concord.errors import InputError
from concord.training import Job, Report, TrainConfig
from concord.training.options import DEFAULT_OUTPUT
from concord.training.sweep import histories


@dataclass(frozen=True, kw_only=True)
class RegressionConfig(TrainConfig):
    """Example 1 of the IRM paper with the tutorial's settings: a linear model from ones, whole batches, SGD."""

    # fmt: off
    train_sigmas: tuple[float, ...] = (0.1, 1.0)
    """Standard deviation of the noise in each training environment."""
    test_sigmas: tuple[float, ...] = (0.01, 0.1, 1.0)
    """That in each test environment."""
    examples: int = 10_000
    """Examples of each environment."""
    dimensions: int = 2
    """Dimensions of the cause, and of the effect."""
    # fmt: on


def environments(config: RegressionConfig) -> Environments:
    """The training environments; the tests, and the training data again, are observed."""
    return linear_example(config.train_sigmas, config.test_sigmas, config.examples, config.dimensions, config.run.seed)


def model(config: RegressionConfig) -> nn.Module:
    """A linear map without bias, all ones."""
    linear = nn.Linear(2 * config.dimensions, 1, bias=False)
    nn.init.ones_(linear.weight)
    return linear


def weights(config: RegressionConfig, trained: nn.Module) -> Mapping[str, float]:  # noqa: ARG001
    """The learned weights, by their places."""
    assert isinstance(trained, nn.Linear)
    return {f"weight_{place}": value for place, value in enumerate(trained.weight[0].tolist())}


@dataclass(frozen=True, kw_only=True)
class RegressionReport:
    """Example 1 over seeds: weights and errors with the penalty and without, the best possible, correlations."""

    # fmt: off
    seeds: int = 5
    """Seeds of the data."""
    epochs: int = 50_000
    """Steps."""
    processes: int = 2
    """Runs at a time."""
    output: Path = DEFAULT_OUTPUT
    """Folder for the figure, and for what was trained already."""
    # fmt: on


# The tutorial's: weights, then errors in the training environments, then in the tests.
TUTORIAL = {
    "irm": [1.0060, 1.0005, 0.0139, 0.0153, 0.0201, 1.9500, 0.0006, 0.0198, 1.9405],
    "erm": [0.6488, 0.6907, 0.3352, 0.3396, 0.2335, 1.1130, 0.2302, 0.2371, 1.1020],
}


def report(options: RegressionReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """The tutorial's tables and histograms, means and standard deviations over seeds beside its own numbers."""
    for option in ("seeds", "epochs", "processes"):
        if getattr(options, option) < 1:
            raise InputError(f"--{option} {getattr(options, option)}: must be at least 1")
    folder = options.output / "reports" / "irm-regression"
    base = job.config.with_options(epochs=options.epochs, evaluations=1, checkpoints=1)
    columns = {f"weight_{place}": f"weight {place}" for place in range(2 * base.dimensions)}
    columns |= {f"seen-{sigma:g}_loss": f"train {sigma:g}" for sigma in base.train_sigmas}
    columns |= {f"test-{sigma:g}_loss": f"test {sigma:g}" for sigma in base.test_sigmas}
    methods = {
        "irm": base,
        "erm": base.with_options(objective="erm", aggregator="mean"),
    }
    configs = {
        name: [config.with_options(seed=seed) for seed in range(options.seeds)] for name, config in methods.items()
    }
    runs = histories(
        job,
        configs,
        folder / "runs.jsonl",
        info,
        shown="train_loss",
        file=__file__,
        processes=options.processes,
    )
    rows: dict[str, dict[str, str]] = {}
    for name, each in runs.items():
        rows[f"{name}, {options.seeds} seeds"] = {
            shown: with_spread([run[-1][column] for run in each], 4) for column, shown in columns.items()
        }
        rows[f"{name}, tutorial"] = dict(zip(columns.values(), map(_shown, TUTORIAL[name]), strict=True))
    sigmas = {column: float(column.split()[1]) for column in columns.values() if not column.startswith("weight")}
    best = {f"weight {place}": _shown(float(place < base.dimensions)) for place in range(2 * base.dimensions)}
    rows["best possible"] = best | {name: _shown(base.dimensions * sigma**2) for name, sigma in sigmas.items()}

    data = environments(base)
    correlations = {}
    for sigma in base.test_sigmas:
        environment = data[f"test-{sigma:g}"]
        together = torch.corrcoef(torch.cat([environment.inputs, environment.targets], 1).T)
        correlations[f"test {sigma:g}"] = {
            f"input {place}": _shown(value) for place, value in enumerate(together[-1, :-1].tolist())
        }
    shown = [*data.train, *(f"test-{sigma:g}" for sigma in base.test_sigmas)]
    figure = save(histograms({name: (data[name].inputs, data[name].targets) for name in shown}), folder / "data.png")
    return {"errors": rows, "correlations": correlations, "figures": {"data": str(figure)}}


def _shown(value: float) -> str:
    return f"{value:.4f}"


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.mse_loss,
    # The tutorial weighs the error with 1e-5 instead, and adds up its two environments, with a learning rate of 1e-3.
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
    report=Report(RegressionReport, report),
)
