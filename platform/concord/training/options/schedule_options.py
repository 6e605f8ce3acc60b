"""Options of the run's length and schedule."""

from dataclasses import dataclass
from typing import Literal

from concord.errors import InputError
from concord.options import OptionGroup, Place, Role, Scoring, option_values


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(OptionGroup):
    """The run's length, schedule, evaluations and checkpoints."""

    role = Role.LEARNING

    # fmt: off
    epochs: int = 20
    """Passes over the largest training environment."""
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
    keep: Literal["last", "best"] = "last"
    """Weights at the end: the last ones, or those of the best evaluation by the job's criterion, on validation
    environments or held-out examples."""
    stop_spread: float = 0.0
    """End the run when the standard deviation of the environments' held-out losses is below this number; 0 disables. If
    the deviation never falls below, the run keeps the model with the smallest deviation."""
    stop_from: float = 0.1
    """Fraction of the run before --stop-spread applies, since untrained models have nearly equal losses."""
    # fmt: on

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

    @property
    def lr_decay_start(self) -> float:
        """The fraction of the run after which the learning rate falls; 1 if it never does."""
        if self.schedule == "cosine":
            return self.warmup
        return min(self.milestones, default=1.0) if self.schedule == "milestones" and self.decay < 1 else 1.0

    def check(self) -> None:
        """Validate options."""
        _ = self.averaging  # refuses a wrong one
        self.require("warmup", 0 <= self.warmup < 1, "must be a fraction of the run, in [0, 1)")
        expected = "--stop-spread decides which weights are kept; give last"
        self.require("keep", self.keep == "last" or self.stop_spread == 0, expected)
        values = option_values(self)
        self.require_at_least(1, "epochs", "evaluations", "checkpoints")
        times = min(self.evaluations, self.epochs)
        right = f"must be from 0 to the number of evaluations, {times}"
        self.require("consistency", 0 <= self.consistency <= times, right)
        for option in ("decay", "decay_per_step"):
            self.require(option, 0 < values[option] <= 1, "must lie in (0, 1]")
        self.require("milestones", all(0 < at < 1 for at in self.milestones), "must be fractions of the run, in (0, 1)")
        self.require("stop_from", 0 <= self.stop_from < 1, "must be a fraction of the run, in [0, 1)")
        self.require_at_least(0, "stop_spread")
