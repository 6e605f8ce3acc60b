"""The options that every training run has; a job adds its own by deriving from :class:`TrainConfig`."""

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self, cast

import torch
from torch import nn

from concord.aggregation import AGGREGATORS, Aggregator, AggregatorName, aggregator
from concord.aggregation.rule_file import OwnRule
from concord.defaults import DEFAULT_OUTPUT as DEFAULT_OUTPUT
from concord.errors import InputError
from concord.gradients import ExampleGradient, Loss, NonFinite, Risk
from concord.objectives import Estimator, Objective, ObjectiveName, objective, objective_type
from concord.redaction import without_secrets
from concord.storage import check_address

AggregatorOption = Literal["auto", "mean", "and-mask", "geometric-mean", "xor-mask", "sand-mask"]
VectorizeOption = Literal["auto", "vmap", "pooled", "one-by-one"]
OptimizerName = Literal["adam", "sgd", "temporal-and-mask"]

_META_IRM = ("inner_lr", "inner_steps", "drop_grad", "outer_environments", "first_order", "same_environment")
_LARGEST_SEED = 2**63 - 1  # that PyTorch takes
_LONGEST_NAME = 200  # letters; it is a folder's name too


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every tracked run has, whatever it trains: its name, where it runs and where it is kept."""

    # fmt: off
    seed: int = 0
    """Seed of everything that is drawn at random."""

    address: str | None = None
    """Ray cluster to run on; without it (or RAY_ADDRESS) Ray starts on this machine."""
    output: Path = DEFAULT_OUTPUT
    """Folder for runs, figures and, without a tracking URI, for MLflow's store; or s3://BUCKET/FOLDER, gs://…"""
    name: str | None = None
    """Name of the run; made up from job and time if not given."""
    resume: bool = False
    """Continue the run called --name where it stopped."""
    tracking_uri: str | None = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI); SQLite under --output if neither is given."""
    register: bool = True
    """Make the model a version in the registry; without it, it is kept with the run alone."""
    # fmt: on

    def resolved(self) -> Self:
        """These options with what is really used wherever one of them leaves it to others, such as ``auto``.

        Whatever trains, records or draws a run takes its options from here. A configuration itself keeps what was
        asked for, so that what follows from an option follows when the option is varied. A job whose options have such
        values overrides it, and begins with ``super().resolved()``.
        """
        return self

    def unused(self) -> frozenset[str]:
        """The options that a run with these does not look at, such as Adam's with SGD; asked of resolved options.

        They are no parameters of the run. A job with such options of its own adds them to ``super().unused()``.
        """
        return frozenset()

    def sources(self) -> dict[str, str]:
        """The texts of the user's files that options name, by the files' names: they are kept with the run."""
        return {}

    def gpu_request(self) -> tuple[float, str]:
        """How many GPUs the run wants of Ray, and which option says so, in words."""
        return 0.0, ""

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError); a job may add its own checks."""
        self.require("seed", self.seed >= 0, "must not be negative")
        self.require("seed", self.seed <= _LARGEST_SEED, f"must not be above {_LARGEST_SEED}")
        check_address("output", self.output)
        if self.resume and self.name is None:
            raise InputError("--resume: needs --name, to know which run to continue")
        if self.name is not None:
            plain = all(letter.isalnum() or letter in "-_." for letter in self.name) and self.name[:1].isalnum()
            self.require("name", plain, "letters, digits, '-', '_' and '.' only, a letter or digit first")
            self.require("name", len(self.name) <= _LONGEST_NAME, f"must not be longer than {_LONGEST_NAME} letters")

    def require(self, option: str, right: bool, expected: str) -> None:
        """Raise InputError for the option, with its value and what was expected, unless ``right``."""
        if not right:
            value = without_secrets({option: getattr(self, option)})[option]
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise InputError(f"--{option.replace('_', '-')} {shown}: {expected}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """One training run."""

    # fmt: off
    seed: int = 0
    """Seed of the data split, the batches, the model's first weights and dropout."""
    epochs: int = 20
    """Passes over the largest training environment."""
    batch_size: int = 128
    """Examples of each environment at each step."""
    held_out: float = 0.1
    """Fraction of every training environment that training never sees; [0, 1)."""

    objective: ObjectiveName = "erm"
    """What is minimized: the environments' mean risk (erm), with a penalty (irm, vrex), the worst combination of risks
    (mm-rex), against a classifier of environments (dann), or risks after adapting to another environment (meta-irm)."""
    penalty_weight: float | None = None
    """λ of irm, dann and meta-irm (there of the meta-losses' standard deviation), β of vrex, -λ_min of mm-rex; if not
    given 1e4 for irm and vrex, 1 for mm-rex and dann, 0 for meta-irm."""
    penalty_warmup: float = 0.0
    """Fraction of the run before the penalty has its weight; irm and vrex have a weight of 1 until then."""
    penalty_estimator: Estimator = "squared"
    """How irm estimates its penalty: the squared gradient of a batch, or the product of its two halves' gradients."""
    inner_lr: float = 0.1
    """Learning rate α of the inner steps of meta-irm."""
    inner_steps: int = 1
    """Inner steps of meta-irm."""
    drop_grad: float = 0.0
    """Rate of Gaussian DropGrad in the inner steps of meta-irm; [0, 1)."""
    outer_environments: int = 0
    """Other environments, drawn anew at each step, that judge what was adapted to one (meta-irm); 0 takes all."""
    first_order: bool = False
    """Leave out the second derivatives of meta-irm (an ablation of the paper)."""
    same_environment: bool = False
    """Let each environment judge what was adapted to itself in meta-irm (an ablation of the paper)."""
    domain_units: int = 256
    """Width of the two hidden layers of dann's domain classifier."""
    representation: str | None = None
    """Linear layer, by its name in the model, whose input dann takes for the representation; the last if not given."""
    stop_spread: float = 0.0
    """End the run when the standard deviation of the environments' held-out losses is below this; 0 never does. If it
    is never reached, the model of the evaluation with the least is kept."""
    stop_from: float = 0.1
    """Fraction of the run before --stop-spread is looked at: untrained models have nearly equal losses."""

    aggregator: AggregatorOption = "auto"
    """How the environments' gradients become one; auto is and-mask with the objective erm, and mean with others. A rule
    of one's own is FILE.py:RULE, a dataclass whose fields are options then."""
    threshold: float = 0.8
    """Agreement threshold τ of the masks, in [0, 1]; 1 asks all environments to agree."""
    rescale: bool = True
    """Divide each layer's update by the fraction of it that the mask kept."""
    environments_per_step: int = 0
    """Environments of a step, in a new random order through all of them each time; 0 takes all at every step. Each
    worker takes its part from its own environments, so which of them meet depends on --workers."""
    vectorize: VectorizeOption = "auto"
    """How one worker computes the gradients of its environments: together by vmap, pooled in one batch, or one by one;
    auto times them at the first step and takes the fastest, so that repeated runs may differ by rounding."""
    nonfinite: NonFinite = "raise"
    """An environment whose gradient is not finite: end the run, leave it out of the step and count it, or let it make
    the update not finite."""

    per_example: bool = False
    """Let every example be an environment of its own: the aggregator compares the examples of a batch."""
    example_gradient: ExampleGradient = "contribution"
    """Under batch norm, an example's gradient is what flows through its activations, or its own loss's (slow)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What layers compute in while training: bfloat16 (autocast) is faster where the hardware has it."""

    optimizer: OptimizerName = "adam"
    """Adam, SGD with momentum, or Adam that moves a weight only while its gradients agree over time."""
    momentum: float = 0.9
    """Momentum of SGD."""
    beta1: float = 0.9
    """β₁ of Adam, with and without mask."""
    beta2: float = 0.999
    """β₂ of Adam, with and without mask."""
    beta3: float = 0.9
    """β₃, the decay of the average of signs, with --optimizer temporal-and-mask."""
    bias_correction: bool = True
    """Adam's correction for averages that begin at 0; the paper's temporal AND-mask Adam is printed without it."""
    temporal_threshold: float = 0.4
    """Agreement threshold τ over time, with --optimizer temporal-and-mask."""
    lr: float = 1e-3
    """Learning rate."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """When the learning rate is multiplied by --decay, as fractions of the run."""
    decay: float = 0.1
    """What the learning rate is multiplied by at each milestone."""
    l1: float = 0.0
    """Coefficient of the L1 penalty."""
    l2: float = 0.0
    """Coefficient of the L2 penalty."""
    regularization: Literal["decoupled", "coupled"] = "decoupled"
    """L1 and L2 as an update of their own (times the learning rate), or added to the gradient after masking."""
    clip: float = 0.0
    """Largest norm of the aggregated gradient; 0 does not clip."""

    workers: int = 1
    """Ray Train workers, among which the environments are divided."""
    min_workers: int | None = None
    """Go on with as few workers as this when nodes leave, the environments divided anew, and with more when they come
    back; without it the run waits until there is room for all --workers."""
    use_gpu: bool = False
    """Give each worker a GPU."""
    max_failures: int = 3
    """How often workers that died are replaced, the run going on from the last checkpoint."""

    evaluations: int = 20
    """How often all environments are evaluated during the run (at the end in any case)."""
    checkpoints: int = 5
    """How many checkpoints are written during the run (at the end in any case)."""

    data_dir: Path | None = field(default_factory=lambda: _path_from_environment("CONCORD_DATA"))
    """Folder with the job's data, if it reads any, or s3://BUCKET/FOLDER, gs://… (or CONCORD_DATA)."""
    # fmt: on

    def __post_init__(self) -> None:
        """Nothing; configurations of users' jobs call it."""

    def resolved(self) -> Self:
        """With the aggregator that ``auto`` stands for, and the weight of the penalty where none is given."""
        weight = objective_type(self.objective).default_weight if self.penalty_weight is None else self.penalty_weight
        chosen = cast(AggregatorName, self.chosen_aggregator)
        return replace(super().resolved(), aggregator=chosen, penalty_weight=weight)

    @property
    def own_rule(self) -> OwnRule | None:
        """The user's own that --aggregator names; see :func:`concord.training.rule_options.config_with_rule`."""
        return None

    def sources(self) -> dict[str, str]:
        """The text of the rule's file, where the rule is the user's own."""
        file = None if self.own_rule is None else self.own_rule.file
        return super().sources() | ({} if file is None else {file.file_name: file.source})

    def unused(self) -> frozenset[str]:
        """The options of other objectives, aggregators and optimizers, and of what is switched off."""
        chosen = self.chosen_aggregator
        looked_at: dict[str, bool] = {
            **dict.fromkeys(("penalty_weight", "penalty_warmup"), self.objective != "erm"),
            "penalty_estimator": self.objective == "irm",
            **dict.fromkeys(_META_IRM, self.objective == "meta-irm"),
            **dict.fromkeys(("domain_units", "representation"), self.objective == "dann"),
            "stop_from": self.stop_spread > 0,
            "threshold": chosen != "mean" if self.own_rule is None else "threshold" in self.own_rule.options,
            "rescale": chosen != "mean",
            "example_gradient": self.per_example,
            "momentum": self.optimizer == "sgd",
            **dict.fromkeys(("beta1", "beta2"), self.optimizer != "sgd"),
            **dict.fromkeys(("beta3", "temporal_threshold", "bias_correction"), self.optimizer == "temporal-and-mask"),
            "decay": len(self.milestones) > 0,
            "regularization": self.l1 > 0 or self.l2 > 0,
        }
        return super().unused() | {name for name, looked in looked_at.items() if not looked}

    @property
    def chosen_aggregator(self) -> AggregatorName | str:
        """The aggregator, also where it is ``auto``; ``FILE.py:RULE`` of a rule of the user's own."""
        if self.aggregator == "auto":
            return "and-mask" if self.objective == "erm" else "mean"
        return self.aggregator

    @property
    def method(self) -> str:
        """What distinguishes the run, for its name: the aggregator, or the objective, or both where both are chosen."""
        chosen = self.chosen_aggregator.rpartition(":")[2]  # of a rule of the user's own, its name
        if self.objective == "erm":
            return chosen
        return self.objective if chosen == "mean" else f"{self.objective}-{chosen}"

    def rule(self) -> Aggregator:
        """The aggregator of these options.

        Raises:
            InputError: an option is out of its range.
        """
        if self.own_rule is not None:
            return self.own_rule.made(vars(self))
        return aggregator(cast(AggregatorName, self.chosen_aggregator), self.threshold)

    def objective_of(self, loss: Loss | Risk, steps: int, autocast: torch.dtype | None = None) -> Objective:
        """What a run of so many steps minimizes.

        Raises:
            InputError: an option is out of its range.
        """
        return objective(
            self.objective,
            loss,
            penalty_weight=self.penalty_weight,
            warmup_steps=round(self.penalty_warmup * steps),
            estimator=self.penalty_estimator,
            inner_lr=self.inner_lr,
            inner_steps=self.inner_steps,
            drop_grad=self.drop_grad,
            outer=self.outer_environments,
            first_order=self.first_order,
            same_environment=self.same_environment,
            autocast=autocast,
        )

    def gpu_request(self) -> tuple[float, str]:
        """One for each worker, with --use-gpu."""
        least = self.min_workers or self.workers
        return float(least) * self.use_gpu, f"--use-gpu: {least} workers want a GPU each"

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError); a job may add its own checks."""
        super().check()
        if self.data_dir is not None:
            check_address("data-dir", self.data_dir)
        if self.own_rule is None and self.chosen_aggregator not in AGGREGATORS:
            raise InputError(f"--aggregator {self.aggregator}: must be one of {', '.join(AGGREGATORS)}")
        resolved = self.resolved()
        for option in ("epochs", "batch_size", "workers", "evaluations", "checkpoints"):
            self.require(option, getattr(resolved, option) >= 1, "must be at least 1")
        if self.min_workers is not None:
            self.require(
                "min_workers", 1 <= self.min_workers <= self.workers, f"between 1 and --workers {self.workers}"
            )
            whole = self.environments_per_step == 0
            self.require(
                "min_workers", whole, "which environments meet depends on the workers; --environments-per-step 0"
            )
        self._check_objective()
        for option in ("l1", "l2", "clip", "max_failures", "environments_per_step"):
            self.require(option, getattr(self, option) >= 0, "must not be negative")
        for option in ("momentum", "beta1", "beta2", "beta3"):
            self.require(option, 0 <= getattr(self, option) < 1, "must lie in [0, 1)")
        right = 0 <= self.temporal_threshold <= 1
        self.require("temporal_threshold", right, "the agreement threshold must lie in [0, 1]")
        right = self.bias_correction or self.optimizer == "temporal-and-mask"
        self.require("bias_correction", right, "only --optimizer temporal-and-mask can do without")
        whole = self.environments_per_step == 0 or not self.per_example
        self.require("environments_per_step", whole, "with --per-example every step takes all; give 0")
        self.require("threshold", 0 <= self.threshold <= 1, "the agreement threshold must lie in [0, 1]")
        alone = self.per_example and self.batch_size == 1
        self.require("batch_size", not alone, "with --per-example a batch needs at least 2 examples to compare")
        alike = self.per_example or self.example_gradient == "contribution"
        self.require("example_gradient", alike, "needs --per-example")
        self.require("held_out", 0 <= self.held_out < 1, "the held-out fraction must lie in [0, 1)")
        self.require("lr", 0 < self.lr < math.inf, "must be a finite number above 0")
        self.require("decay", 0 < self.decay <= 1, "must lie in (0, 1]")
        self.require("milestones", all(0 < at < 1 for at in self.milestones), "fractions of the run, between 0 and 1")
        if self.own_rule is not None:
            self.own_rule.check(self.rule())

    def _check_objective(self) -> None:
        for option in ("penalty_warmup", "stop_from"):
            self.require(option, 0 <= getattr(self, option) < 1, "a fraction of the run, in [0, 1)")
        self.require("domain_units", self.domain_units >= 1, "must be at least 1")
        self.require("outer_environments", self.outer_environments >= 0, "must not be negative")
        self.objective_of(nn.functional.mse_loss, 1)  # any loss: the options are what is tried
        self.require("stop_spread", self.stop_spread >= 0, "must not be negative")
        compared = self.stop_spread == 0 or self.held_out > 0
        self.require("stop_spread", compared, "looks at held-out examples; give --held-out above 0")
        alone = self.objective == "erm" or not self.per_example
        self.require("objective", alone, "compares environments; with --per-example, where examples are, give erm")
        if objective_type(self.objective).coupled:
            averaged = f"--objective {self.objective} couples the environments: its gradient is one"
            self.require("aggregator", self.chosen_aggregator == "mean", f"{averaged}, give mean")
            right = self.nonfinite != "skip"
            self.require("nonfinite", right, f"{averaged}, no environment can be left out; raise or propagate")
        told = self.objective != "dann" or self.environments_per_step == 0
        self.require("environments_per_step", told, "--objective dann tells all environments apart; give 0")


# What may differ when a run is resumed: where and how it runs, not what it computes.
RUNTIME_OPTIONS = frozenset(
    {
        "name",
        "workers",
        "min_workers",
        "use_gpu",
        "address",
        "max_failures",
        "data_dir",
        "output",
        "resume",
        "tracking_uri",
        "register",
    }
)


def _path_from_environment(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None
