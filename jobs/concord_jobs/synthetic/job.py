"""The synthetic memorization task (AND-mask paper, §3.1): spirals that all environments share, shortcuts that differ.

Every training environment is separated perfectly, and easily, by its shortcuts; the pooled data too. Only the
spirals hold in the test environment, where shortcuts are random. ``concord train synthetic`` trains with the
AND-mask, with fewer than 18 environments with the t-mask, and ``--aggregator mean`` gives the baseline;
``concord compare synthetic`` makes the paper's Fig. 6, 14 and 15, ``concord report synthetic`` Fig. 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from matplotlib.figure import Figure
from torch import nn

from concord.aggregation import DEFAULT_SIGNIFICANCE
from concord.aggregation.chance import least_environments
from concord.analysis.figures import method_name
from concord.environments import Environments
from concord.models import MLP
from concord.models.mlp_options import MLPOptions
from concord.options import option_values
from concord.space import Choice, Entry, OneOf, Space, Uniform
from concord.training import Job, Outcome, Report, Study, TrainConfig
from concord.training.options import AggregatorOptions
from concord_jobs.synthetic.correlation_report import CorrelationReport, report_correlations
from concord_jobs.synthetic.figures import data_figure, decision_figure
from concord_jobs.synthetic.spirals import MECHANISM_DIMENSIONS, SpiralOptions, Spirals

COUNTING = ("threshold", "environment_momentum", "steps_per_update", "per_example")


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig(TrainConfig):
    """The synthetic memorization task of the AND-mask paper (§3.1, appendix B)."""

    spirals: SpiralOptions = field(default_factory=SpiralOptions)
    mlp: MLPOptions = field(default_factory=MLPOptions)

    # fmt: off
    batch_norm: bool = False
    """Batch normalization of the hidden layers, by each environment's own batch."""
    initialization: Literal["kaiming", "default"] = "kaiming"
    """How the first weights are drawn."""
    # fmt: on

    def resolve(self, num_environments: int | None = None) -> Self:
        """With the paper's number of epochs where it is 0, and the rule for few environments.

        With too few environments for a sign mask, ``auto`` is the t-mask of averages over steps, unless an option of
        the sign mask is given.
        """
        asked, few = self.aggregation, 1 < self.spirals.environments < least_environments(DEFAULT_SIGNIFICANCE)
        counted = any(getattr(asked, name) != getattr(AggregatorOptions(), name) for name in COUNTING)
        counted = counted or self.data.environments_per_step > 0
        by_test = few and not counted and asked.aggregator == "auto" and self.objective.objective == "erm"
        config = self.with_options(aggregator="t-mask", environment_momentum=0.9) if by_test else self
        paper = max(1, round(3000 / max(self.spirals.environments, 1)))
        resolved = super(SyntheticConfig, config).resolve(num_environments)
        return resolved.with_options(epochs=self.schedule.epochs or paper)


def environments(config: SyntheticConfig) -> Environments:
    """Training, validation and o.o.d. environments, each made by the worker that owns it."""
    return Spirals.of(config.spirals, config.data.held_out, config.run.seed).as_environments()


def model(config: SyntheticConfig) -> nn.Module:
    """An MLP with LeakyReLU and two outputs."""
    features = MECHANISM_DIMENSIONS + config.spirals.shortcut_dimensions
    return MLP(
        features, 2, **option_values(config.mlp), batch_norm=config.batch_norm, initialization=config.initialization
    )


def figures(job: Job[Any], config: SyntheticConfig, outcome: Outcome, trained: nn.Module) -> Mapping[str, Figure]:
    """The data (Fig. 5, if there are shortcuts to show) and what the trained network decides on the spiral's plane."""
    data = Spirals.of(config.spirals, config.data.held_out, config.run.seed)
    test = data.load("ood")
    title = f"{method_name(config.method)}, o.o.d. accuracy {outcome.metrics['ood_accuracy']:.3f}"
    drawn = {"decision": decision_figure(trained, test, title)}
    if config.spirals.shortcut_dimensions >= 2:
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


def study(**entries: Entry) -> Study:
    """Table 1 and these entries, with the paper's rule (B.3) to end a trial early, which looks at the test."""
    return Study(Space({**TABLE_1, **entries}), stop_when=("train_accuracy>0.97", "ood_accuracy<0.6"))


def averaged(**entries: Entry) -> Study:
    """The same without the mask, and with no regularization but what these entries say."""
    plain: dict[str, Entry] = {"aggregator": "mean", "batch_norm": False, "dropout": 0.0, "l1": 0.0, "l2": 0.0}
    return study(**(plain | entries))


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
    "plain": averaged(),
    "dropout": averaged(dropout=0.5),
    "l1": averaged(l1=L1),
    "l2": averaged(l2=L2),
    "batch-norm": averaged(batch_norm=True),
    # Table 2: the annealing iterations are epochs of the paper's 3000 / 32, and a fraction of the run here.
    "irm": averaged(
        objective="irm",
        batch_norm=Choice(True, False),
        penalty_weight=Choice(10.0, 100.0, 1000.0),
        penalty_warmup=Choice(*(round(epochs / 94, 4) for epochs in (0, 1, 2, 4, 8))),
        lr=Choice(1e-3, 1e-2, 1e-1, 1.0),
    ),
    # B.3.2: embedding, classifier and discriminator of two layers each.
    "dann": averaged(objective="dann", hidden_layers=3, representation="4", domain_units=Choice(256, 512)),
}


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    # 0 epochs stand for the paper's 3000 / environments.
    config=SyntheticConfig().with_options(
        validation_environments=4, hidden_layers=3, epochs=0, lr=1e-2, l1=1e-5, regularization="coupled"
    ),
    reproduces="AND-mask paper §3.1 (synthetic memorization): Fig. 5, 6, 7, 13, 14, 15; Tables 1, 2",
    criterion="validation_accuracy",
    figures=figures,
    report=Report(CorrelationReport, report_correlations),
    comparisons="tables.py",
    studies=STUDIES,
)
