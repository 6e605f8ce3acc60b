"""The option groups of data, optimizer, schedule and workers."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from concord.errors import InputError
from concord.options import Learning, OptionGroup, Place, Role, Scoring, option_values
from concord.storage import check_address

if TYPE_CHECKING:  # with PyTorch
    from concord.environments import Environments

_MANY = 10  # training environments: from here on some can be held out whole


def _default_data() -> Path | None:
    value = os.environ.get("CONCORD_DATA")
    return Path(value) if value else None


LeftOut = str | tuple[str, ...] | None
"""What a run leaves out: nothing, an environment, or a fold of several, in the order of their names."""


def as_names(left_out: LeftOut) -> tuple[str, ...]:
    """The names of the environments."""
    return () if left_out is None else (left_out,) if isinstance(left_out, str) else left_out


def in_short(left_out: LeftOut) -> str:
    """The first name, and how many there are beside it."""
    first, *others = as_names(left_out)
    return f"{first} and {len(others)} more" if others else first


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """The data of a run."""

    # fmt: off
    batch_size: Learning[int] = 128
    """Examples of each environment at each step."""
    held_out: Scoring[float] = 0.1
    """Fraction of every training environment that is held out of training; [0, 1)."""
    held_out_environments: Scoring[float] = 0.0
    """Fraction of the training environments that are held out whole, in place of a part of each, if there are ten or
    more and none is for validation; 0 holds out parts."""
    environment_weights: Learning[Literal["equal", "rows"]] = "equal"
    """Weights of the environments in the average: all alike, or by their training rows (by the sum of their weights, if
    rows have some), so that all rows count alike."""
    environments_per_step: Learning[int] = 0
    """Number of environments of a step, in a new random order on each pass; 0 takes all at every step. A worker draws
    its share from its own environments, so the combinations depend on --workers."""
    leave_out: LeftOut = None
    """Training environments to leave out; they become the only validation environments."""
    data: Place[Path | None] = field(default_factory=_default_data)
    """Folder with the job's data, or with a folder of the dataset's name (mnist, heart-disease), or s3://BUCKET/FOLDER,
    gs://… (or CONCORD_DATA)."""
    readers: Place[int] = 0
    """Number of reader processes of each worker for data that are not in memory; 0 reads in the training process."""
    # fmt: on

    def __post_init__(self) -> None:
        if isinstance(self.leave_out, tuple):  # one name is itself, as in all records; several are a set
            names = tuple(sorted(set(self.leave_out)))
            object.__setattr__(self, "leave_out", names if len(names) > 1 else next(iter(names), None))

    @property
    def left_out(self) -> tuple[str, ...]:
        """The environments of ``leave_out``."""
        return as_names(self.leave_out)

    def check(self) -> None:
        """Validate options."""
        if self.data is not None:
            check_address("data", self.data)
        self.require_at_least(1, "batch_size")
        self.require_at_least(0, "environments_per_step", "readers")
        self.require("held_out", 0 <= self.held_out < 1, "the held-out fraction must lie in [0, 1)")
        right = 0 <= self.held_out_environments < 1
        self.require("held_out_environments", right, "must be a fraction of the training environments, in [0, 1)")

    def holds_out_whole(self, environments: "Environments") -> bool:
        """Whether some of these training environments are held out whole."""
        asked = self.held_out > 0 and self.held_out_environments > 0
        chosen = environments.validation or environments.held_out  # by the job
        return asked and len(environments.train) >= _MANY and not chosen


OptimizerName = Literal["adam", "adamw", "sgd", "temporal-and-mask"]


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(OptionGroup):
    """The optimizer of the aggregated gradient."""

    role = Role.LEARNING

    # fmt: off
    optimizer: OptimizerName = "adam"
    """Adam, AdamW (Adam with --weight-decay), SGD with momentum, or Adam with a mask: a weight moves only while its
    gradients agree over time."""
    lr: float = 1e-3
    """Learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW: each step shrinks all weights by this times the learning rate."""
    momentum: float = 0.9
    """Momentum of SGD."""
    beta1: float | None = None
    """β₁ of Adam, with and without mask; by default 0.9, or 0 with --environment-momentum, since two averages in a row
    overshoot."""
    beta2: float = 0.999
    """β₂ of Adam, with and without mask."""
    beta3: float = 0.9
    """β₃, the decay of the average of signs, with --optimizer temporal-and-mask."""
    bias_correction: bool = True
    """Adam's correction of averages that begin at 0; the paper prints temporal AND-mask Adam without it."""
    temporal_threshold: float = 0.4
    """Agreement threshold τ over time, with --optimizer temporal-and-mask."""
    l1: float = 0.0
    """Coefficient of the L1 penalty."""
    l2: float = 0.0
    """Coefficient of the L2 penalty."""
    regularization: Literal["decoupled", "coupled"] = "decoupled"
    """L1 and L2 as an update of their own, times the learning rate (decoupled), or added to the gradient after masking
    (coupled); an objective that is divided by a large penalty weight divides these, too."""
    clip: float = 0.0
    """Largest norm of the aggregated gradient; 0 does not clip."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of layers in training (autocast): bfloat16 is faster on hardware that supports it. With float16, for
    GPUs without bfloat16, the loss is scaled; a step whose gradient overflows by it is left out."""
    compile: bool = False
    """Compile the rule by torch.compile, and the model for training steps, where each environment has a pass of its
    own: with a worker for each environment, or --vectorize one-by-one. Results differ by rounding, and by dropout's
    masks."""
    # fmt: on

    @property
    def betas(self) -> tuple[float, float]:
        """β₁ and β₂ of Adam; of resolved options."""
        return 0.9 if self.beta1 is None else self.beta1, self.beta2

    def unused(self) -> frozenset[str]:
        """The options of other optimizers and of disabled features."""
        used = {
            "weight_decay": self.optimizer == "adamw",
            "momentum": self.optimizer == "sgd",
            **dict.fromkeys(("beta1", "beta2"), self.optimizer != "sgd"),
            **dict.fromkeys(("beta3", "temporal_threshold", "bias_correction"), self.optimizer == "temporal-and-mask"),
            "regularization": self.l1 > 0 or self.l2 > 0,
        }
        return frozenset(name for name, is_used in used.items() if not is_used)

    def check(self) -> None:
        """Validate options."""
        values = option_values(self)
        self.require_at_least(0, "weight_decay", "l1", "l2", "clip")
        for option in ("momentum", "beta1", "beta2", "beta3"):
            right = (option == "beta1" and self.beta1 is None) or 0 <= values[option] < 1
            self.require(option, right, "must lie in [0, 1)")
        right = 0 <= self.temporal_threshold <= 1
        self.require("temporal_threshold", right, "the agreement threshold must lie in [0, 1]")
        right = self.bias_correction or self.optimizer == "temporal-and-mask"
        self.require("bias_correction", right, "only --optimizer temporal-and-mask can switch it off")
        self.require("lr", 0 < self.lr < math.inf, "must be a finite number above 0")


def spread(times: int, epochs: int) -> set[int]:
    """``times`` of the epochs 1 to ``epochs``, evenly spread, with the last one."""
    times = min(times, epochs)
    return {round((index + 1) * epochs / times) for index in range(times)}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(OptionGroup):
    """The run's length, schedule, evaluations and checkpoints."""

    role = Role.LEARNING

    # fmt: off
    epochs: int = 20
    """Passes over the largest training environment; but see --epoch-steps."""
    epoch_steps: int = 0
    """Least number of steps of an epoch: where one pass over the largest environment has fewer, an epoch is several."""
    schedule: Literal["milestones", "cosine", "constant"] = "milestones"
    """Learning rate over the run: times --decay at each of --milestones, half a cosine down to 0, or constant."""
    warmup: float = 0.0
    """Fraction of the run in which the learning rate rises linearly from near 0 to that of --schedule."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Fractions of the run at which the learning rate is multiplied by --decay."""
    decay: float = 0.1
    """Factor of the learning rate at each milestone."""
    decay_per_step: float = 1.0
    """Factor of the learning rate after every step; 1 disables."""
    evaluations: Scoring[int] = 20
    """Number of evaluations of all environments during the run, with one at the end."""
    consistency: int = 0
    """Number of evaluations at which the environments' gradient signs and curvatures are compared; 0 compares none."""
    checkpoints: Place[int] = 5
    """Number of checkpoints during the run, with one at the end; one worker also writes one after each epoch that ends
    more than 5 minutes after the last one."""
    average: str | None = None
    """Average of the weights, evaluated and registered in place of the last ones: ema:0.999 (exponential, over steps,
    with this decay) or swa:0.75 (mean over the epochs after this fraction of the run); by default none."""
    keep: Literal["last", "best", "least-loss"] = "last"
    """Weights at the end: the last ones, or those of the best evaluation by the job's criterion or by the loss, on
    validation environments or held-out examples."""
    patience: int = 0
    """End the run after this number of evaluations without a better value, and keep the best evaluation's weights
    (--keep best, unless least-loss is given); 0 disables."""
    stop_spread: float = 0.0
    """End the run when the standard deviation of the environments' held-out losses is below this number; 0 disables. If
    the deviation never falls below, the run keeps the model with the smallest deviation."""
    stop_from: float = 0.1
    """Fraction of the run before --stop-spread applies, since untrained models have nearly equal losses."""
    # fmt: on

    def implied(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """With patience the best weights are kept."""
        return {"keep": "best"} if changes.get("patience") and self.keep == "last" else {}

    def unused(self) -> frozenset[str]:
        """The options of disabled features."""
        stepwise = self.schedule == "milestones"
        used = {
            "stop_from": self.stop_spread > 0,
            "milestones": stepwise,
            "decay": stepwise and len(self.milestones) > 0,
        }
        return frozenset(name for name, is_used in used.items() if not is_used)

    @property
    def evaluated_after(self) -> set[int]:
        """The epochs after which all environments are evaluated."""
        return spread(self.evaluations, self.epochs)

    @property
    def early_end(self) -> str:
        """Why a run with these options ends before its last epoch."""
        if self.stop_spread > 0:
            return f"held_out_spread < {self.stop_spread:g}"
        return f"{self.patience} evaluations without a better one"

    @property
    def averaging(self) -> tuple[str, float] | None:
        """The kind of average, ema or swa, and its decay or beginning; None without one."""
        if self.average is None:
            return None
        kind, _, number = self.average.partition(":")
        try:
            value = float(number)
        except ValueError:
            kind = ""
        if kind not in ("ema", "swa"):
            raise InputError(
                f"--average {self.average}: give ema:DECAY, such as ema:0.999, or swa:FRACTION, such as swa:0.75"
            )
        if kind == "ema":
            self.require("average", 0 < value < 1, "the decay must lie in (0, 1)")
        self.require("average", 0 <= value < 1, "begins after the end; give a fraction of the run in [0, 1)")
        return kind, value

    def lr_halved(self, steps: int) -> float:
        """The fraction of a run of these steps after which the rate is below half of --lr; 1 if it never is."""
        lowered = [0.5] if self.schedule == "cosine" else []
        if self.schedule == "milestones" and self.decay < 1:
            lowered += sorted(self.milestones)[math.ceil(math.log(0.5, self.decay) + 1e-9) - 1 :]
        if self.decay_per_step < 1:
            lowered.append(math.log(0.5, self.decay_per_step) / max(steps, 1))
        return min([1.0, *lowered])

    def check(self) -> None:
        """Validate options."""
        _ = self.averaging  # refuses a wrong one
        self.require("warmup", 0 <= self.warmup < 1, "must be a fraction of the run, in [0, 1)")
        expected = "--stop-spread decides which weights are kept; give last"
        self.require("keep", self.keep == "last" or self.stop_spread == 0, expected)
        expected = "ends with the best evaluation's weights; give --keep best"
        self.require("patience", self.patience == 0 or self.keep != "last", expected)
        values = option_values(self)
        self.require_at_least(0, "patience", "epoch_steps")
        self.require_at_least(1, "epochs", "evaluations", "checkpoints")
        times = min(self.evaluations, self.epochs)
        right = f"must be from 0 to the number of evaluations, {times}"
        self.require("consistency", 0 <= self.consistency <= times, right)
        for option in ("decay", "decay_per_step"):
            self.require(option, 0 < values[option] <= 1, "must lie in (0, 1]")
        self.require("milestones", all(0 < at < 1 for at in self.milestones), "must be fractions of the run, in (0, 1)")
        self.require("stop_from", 0 <= self.stop_from < 1, "must be a fraction of the run, in [0, 1)")
        self.require_at_least(0, "stop_spread")


Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(OptionGroup):
    """The worker processes."""

    # fmt: off
    workers: Place[int] = 1
    """Number of worker processes, which divide the environments; several workers run on Ray Train."""
    min_workers: Place[int | None] = None
    """Least number of workers after a loss of nodes; the run divides the environments anew, and grows when nodes
    return. By default the run waits until all --workers fit."""
    device: Place[Device] = "auto"
    """auto, cpu or cuda; auto is cuda if this machine has a GPU for each worker, else cpu; on a cluster it is cpu."""
    max_failures: Place[int] = 3
    """Number of times that dead workers are replaced; the run continues from its last checkpoint."""
    graph: Place[bool] = False
    """On a GPU, replay a step as one CUDA graph where it can be captured; a line says why where it cannot."""
    # fmt: on

    @property
    def least_workers(self) -> int:
        """The number of workers with which the run goes on."""
        return self.min_workers or self.workers

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(1, "workers")
        self.require_at_least(0, "max_failures")
        if self.min_workers is not None:
            right = 1 <= self.min_workers <= self.workers
            self.require("min_workers", right, f"must lie in [1, {self.workers}], up to --workers")
