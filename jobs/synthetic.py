"""The synthetic memorization task (AND-mask paper, §3.1): spirals that all environments share, shortcuts that differ.

Every training environment is separated perfectly, and easily, by its shortcuts; the pooled data too. Only the
spirals hold in the test environment, where shortcuts are random. ``concord train synthetic`` trains with the
AND-mask, ``--aggregator mean`` gives the baseline, ``concord report synthetic`` the paper's figures.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from matplotlib.figure import Figure
from torch import nn

from concord.analysis.figures import method_name, save
from concord.analysis.gradient_correlation import (
    Correlation,
    gradient_correlations,
    summarize,
    write_correlations,
)
from concord.analysis.synthetic_figures import (
    comparison_figure,
    correlation_figure,
    data_figure,
    decision_figure,
    environments_figure,
)
from concord.environments import BatchStream, Environments, Spirals
from concord.environments.spirals import MECHANISM_DIMENSIONS
from concord.errors import InputError
from concord.models import MLP
from concord.options import option_values
from concord.runs.tracked import finished_histories
from concord.space import Choice, Entry, OneOf, Space, Uniform
from concord.training import Job, Outcome, Report, Study, TrainConfig
from concord.training.options import DEFAULT_OUTPUT
from concord.training.sweep import histories


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig(TrainConfig):
    """The synthetic memorization task of the AND-mask paper (§3.1, appendix B)."""

    # fmt: off
    environments: int = 32
    """Training environments, the paper's D."""
    examples: int = 1280
    """Training examples of each environment; its held-out part comes on top."""
    test_examples: int = 2000
    """Examples of the out-of-distribution test, each with shortcuts of its own."""
    validation_environments: int = 4
    """More environments, with shortcuts of their own, to choose models by without looking at the test."""
    shortcut_dimensions: int = 32
    """Dimensions of the shortcuts, d_S."""
    shortcut_scale: float = 0.1**0.5
    """Standard deviation of the shortcuts' components; the paper's N(0, 0.1), read as a variance, is 0.316."""
    revolutions: float = 3.0
    """Revolutions of each spiral."""
    smallest_radius: float = 0.08
    """Smallest radius of the spirals, before noise."""
    largest_radius: float = 1.0
    """Largest radius of the spirals, before noise."""
    radius_noise: float = 0.02
    """Largest noise on the radius."""

    hidden_units: int = 256
    """Width of the hidden layers."""
    hidden_layers: int = 3
    """Number of hidden layers."""
    dropout: float = 0.0
    """Dropout probability of the hidden layers."""
    batch_norm: bool = False
    """Batch normalization of the hidden layers, by each environment's own batch."""
    initialization: Literal["kaiming", "default"] = "kaiming"
    """How the first weights are drawn."""
    # fmt: on

    def resolved(self) -> Self:
        """With the paper's number of epochs where it is 0."""
        paper = max(1, round(3000 / max(self.environments, 1)))
        return super().resolved().with_options(epochs=self.schedule.epochs or paper)

    def check(self) -> None:
        """Also refuse what makes no network."""
        super().check()
        self.require("dropout", 0 <= self.dropout < 1, "must lie in [0, 1)")
        for option in ("hidden_units", "hidden_layers"):
            self.require(option, option_values(self)[option] >= 1, "must be at least 1")


def spirals(config: SyntheticConfig) -> Spirals:
    """The data of this configuration."""
    return Spirals(
        environments=config.environments,
        examples=round(config.examples / (1 - config.data.held_out)),
        test_examples=config.test_examples,
        validation_environments=config.validation_environments,
        shortcut_dimensions=config.shortcut_dimensions,
        shortcut_scale=config.shortcut_scale,
        revolutions=config.revolutions,
        smallest_radius=config.smallest_radius,
        largest_radius=config.largest_radius,
        radius_noise=config.radius_noise,
        seed=config.run.seed,
    )


def environments(config: SyntheticConfig) -> Environments:
    """Training, validation and o.o.d. environments, each made by the worker that owns it."""
    return spirals(config).as_environments()


def model(config: SyntheticConfig) -> nn.Module:
    """An MLP with LeakyReLU and two outputs."""
    return MLP(
        MECHANISM_DIMENSIONS + config.shortcut_dimensions,
        2,
        config.hidden_units,
        config.hidden_layers,
        config.dropout,
        config.batch_norm,
        config.initialization,
    )


def figures(job: Job[Any], config: SyntheticConfig, outcome: Outcome, trained: nn.Module) -> Mapping[str, Figure]:  # noqa: ARG001
    """The data (Fig. 5, if there are shortcuts to show) and what the trained network decides on the spiral's plane."""
    data = spirals(config)
    test = data.load("ood")
    title = f"{method_name(config.method)}, o.o.d. accuracy {outcome.metrics['ood_accuracy']:.3f}"
    drawn = {"decision": decision_figure(trained, test, title)}
    if config.shortcut_dimensions >= 2:
        names = data.as_environments().train[:2]
        drawn["data"] = data_figure({name: data.load(name) for name in names}, test)
    return drawn


# Table 1 of the paper. The penalties are never combined.
TABLE_1: dict[str, Entry] = {
    "hidden_units": Choice(256, 512),
    "hidden_layers": Choice(3, 5),
    "batch_size": Choice(64, 128, 256),
    "optimizer": Choice("adam", "sgd"),
    "lr": Choice(1e-3, 1e-2, 1e-1),
}
L1, L2 = Choice(1e-6, 1e-5, 1e-4), Choice(1e-5, 1e-4, 1e-3)
UNREGULARIZED: dict[str, Entry] = {"aggregator": "mean", "batch_norm": False, "dropout": 0.0, "l1": 0.0, "l2": 0.0}


def study(**entries: Entry) -> Study:
    """Table 1 and these entries, with the paper's rule (B.3) to end a trial early, which looks at the test."""
    return Study(Space({**TABLE_1, **entries}), stop_when=("train_accuracy>0.97", "ood_accuracy<0.6"))


# The methods of Fig. 6.
STUDIES = {
    "and-mask": study(
        aggregator="and-mask",
        threshold=Uniform(0.0, 1.0),
        rescale=Choice(True, False),
        batch_norm=Choice(True, False),
        dropout=Choice(0.0, 0.5),
        regularizer=OneOf({"none": {"l1": 0.0, "l2": 0.0}, "l1": {"l1": L1, "l2": 0.0}, "l2": {"l1": 0.0, "l2": L2}}),
    ),
    "plain": study(**UNREGULARIZED),
    "dropout": study(**{**UNREGULARIZED, "dropout": 0.5}),
    "l1": study(**{**UNREGULARIZED, "l1": L1}),
    "l2": study(**{**UNREGULARIZED, "l2": L2}),
    "batch-norm": study(**{**UNREGULARIZED, "batch_norm": True}),
    # Table 2: the annealing iterations are epochs of the paper's 3000 / 32, and a fraction of the run here.
    "irm": study(
        **{
            **UNREGULARIZED,
            "objective": "irm",
            "batch_norm": Choice(True, False),
            "penalty_weight": Choice(10.0, 100.0, 1000.0),
            "penalty_warmup": Choice(*(round(epochs / 94, 4) for epochs in (0, 1, 2, 4, 8))),
            "lr": Choice(1e-3, 1e-2, 1e-1, 1.0),
        }
    ),
    # B.3.2: embedding, classifier and discriminator of two layers each.
    "dann": study(
        **{
            **UNREGULARIZED,
            "objective": "dann",
            "hidden_layers": 3,
            "representation": "4",
            "domain_units": Choice(256, 512),
        }
    ),
}


@dataclass(frozen=True, kw_only=True)
class SyntheticReport:
    """Figures of the synthetic task: gradient correlations, curves of tracked runs, accuracy by environments."""

    # fmt: off
    seeds: int = 10
    """Networks for the gradient correlations (Fig. 7)."""
    environments: int = 16
    """Environments for the gradient correlations."""
    batch_size: int = 1024
    """Examples of each environment for the gradient correlations."""
    shortcut_scale: float = 0.1**0.5
    """Standard deviation of the shortcuts."""
    revolutions: float = 3.0
    """Revolutions of each spiral."""
    counts: tuple[int, ...] = ()
    """Numbers of training environments to train with (Fig. 15), such as 2 4 8 16 32; none skips it."""
    runs: int = 5
    """Runs for each of --counts and method."""
    threshold: float = 0.8
    """Agreement threshold τ of the AND-mask for Fig. 15."""
    output: Path = DEFAULT_OUTPUT
    """Folder for runs, figures and, without a tracking URI, for MLflow's store."""
    tracking_uri: str | None = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI); SQLite under --output if neither is given."""
    # fmt: on


def report(options: SyntheticReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Fig. 7 by measuring, Fig. 14 from the tracked runs, Fig. 15 by training."""
    for option in ("seeds", "environments", "batch_size", "runs"):
        if getattr(options, option) < 1:
            raise InputError(f"--{option.replace('_', '-')} {getattr(options, option)}: must be at least 1")
    if any(count < 1 for count in options.counts):
        raise InputError(f"--counts {' '.join(map(str, options.counts))}: every number must be at least 1")
    tracked = finished_histories("synthetic", options.output, options.tracking_uri, by="aggregator")
    folder = options.output / "reports" / "synthetic"
    result: dict[str, Any] = {"job": "synthetic", "figures": {}}

    thresholds = [index / 10 for index in range(11)]
    data = Spirals(
        environments=options.environments,
        examples=options.batch_size,
        shortcut_scale=options.shortcut_scale,
        revolutions=options.revolutions,
    ).as_environments()
    inputs, targets = BatchStream(data.load(data.train), options.batch_size, seed=0).batch(0)
    correlations: list[Correlation] = []
    for seed in range(options.seeds):
        network = lambda: MLP(inputs.shape[-1], 2, initialization="default")  # noqa: E731
        correlations += gradient_correlations(network, inputs, targets, MECHANISM_DIMENSIONS, thresholds, seed)
        info(f"gradient correlations: {seed + 1} of {options.seeds} networks")
    result["figures"]["correlation"] = str(save(correlation_figure(correlations), folder / "correlation.png"))
    result["correlation"] = {
        f"{mask} τ={threshold:g} {signal}": _correlation(correlations, mask, threshold, signal)
        for mask, at in (("and-mask", (0.0, 0.5, 0.7, 0.8, 1.0)), ("xor-mask", (0.5, 1.0)))
        for threshold in at
        for signal in ("mechanism", "shortcuts")
    }
    write_correlations(correlations, folder / "correlation.csv")

    if tracked:
        result["figures"]["curves"] = str(save(comparison_figure(tracked), folder / "curves.png"))
    else:
        info("curves: no finished run of synthetic is tracked yet; concord train synthetic makes one")

    if options.counts:
        runs = {
            method: histories(
                job,
                {
                    count: [
                        job.config.with_options(
                            environments=count,
                            # 4096 examples a step for any number of environments: then the paper's 3000 / D
                            # epochs are about 940 steps for all of them.
                            batch_size=max(1, min(4096 // count, 1280)),
                            evaluations=1,
                            seed=seed,
                            aggregator=method,
                            threshold=options.threshold,
                            shortcut_scale=options.shortcut_scale,
                            revolutions=options.revolutions,
                        )
                        for seed in range(options.runs)
                    ]
                    for count in options.counts
                },
                folder / f"environments-{method}.jsonl",
                info,
                shown="ood_accuracy",
            )
            for method in ("and-mask", "mean")
        }
        ended = {method: {n: [run[-1] for run in each] for n, each in by.items()} for method, by in runs.items()}
        accuracies = {
            method: {count: [metrics["ood_accuracy"] for metrics in each] for count, each in by_count.items()}
            for method, by_count in ended.items()
        }
        result["figures"]["environments"] = str(save(environments_figure(accuracies), folder / "environments.png"))
        result["environments"] = accuracies
        result["accuracy"] = {
            f"{method_name(method)}, {count} environments": _summary(each)
            for method, by_count in ended.items()
            for count, each in by_count.items()
        }
    return result


def _correlation(correlations: Sequence[Correlation], mask: str, threshold: float, signal: str) -> str:
    """ρ in a table's cell, with what it rests on."""
    found = summarize(c for c in correlations if (c.mask, c.threshold, c.signal) == (mask, threshold, signal))
    least, most = found.components[0], found.components[-1]
    mean = "too few" if math.isnan(found.mean) else f"{found.mean:.2f} ± {found.deviation:.2f}"
    pooled = "too few" if math.isnan(found.pooled) else f"{found.pooled:.2f}"
    return (
        f"{mean} ({found.networks} of {found.of} networks); pooled {pooled} "
        f"({sum(found.components)} components, {least} to {most} a network)"
    )


def _summary(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the runs of one method and number of environments ended with: a row of the README's table."""
    ood = [metrics["ood_accuracy"] for metrics in runs]
    return {
        "o.o.d. mean": sum(ood) / len(ood),
        "o.o.d. least": min(ood),
        "o.o.d. largest": max(ood),
        "train least": min(metrics["train_accuracy"] for metrics in runs),
    }


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    # 0 epochs stand for the paper's 3000 / environments.
    config=SyntheticConfig().with_options(epochs=0, lr=1e-2, l1=1e-5, regularization="coupled"),
    reproduces="AND-mask paper §3.1 (synthetic memorization): Fig. 5, 7, 13; Fig. 6 by smaller searches of Table 1; "
    "Fig. 14 of two methods",
    criterion="validation_accuracy",
    figures=figures,
    report=Report(SyntheticReport, report),
    studies=STUDIES,
)
