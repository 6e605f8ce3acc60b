"""Options of the run's length and schedule."""

from dataclasses import dataclass

from concord.options import OptionGroup, option_values


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(OptionGroup):
    """The run's length, schedule, evaluations and checkpoints."""

    # fmt: off
    epochs: int = 20
    """Passes over the largest training environment."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Fractions of the run at which the learning rate is multiplied by --decay."""
    decay: float = 0.1
    """Factor of the learning rate at each milestone."""
    decay_per_step: float = 1.0
    """Factor of the learning rate after every step; 1 keeps it."""
    evaluations: int = 20
    """Number of evaluations of all environments during the run, with one at the end."""
    consistency: int = 0
    """Number of evaluations at which the environments' gradient signs and curvatures are compared; 0: none."""
    checkpoints: int = 5
    """Number of checkpoints during the run, with one at the end."""
    stop_spread: float = 0.0
    """End the run when the standard deviation of the environments' held-out losses is below this; 0 disables. If it
    is never reached, the model with the least deviation is kept."""
    stop_from: float = 0.1
    """Fraction of the run before --stop-spread applies: untrained models have nearly equal losses."""
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of disabled features."""
        looked_at = {"stop_from": self.stop_spread > 0, "decay": len(self.milestones) > 0}
        return frozenset(name for name, looked in looked_at.items() if not looked)

    def check(self) -> None:
        """Validate options."""
        values = option_values(self)
        for option in ("epochs", "evaluations", "checkpoints"):
            self.require(option, values[option] >= 1, "must be at least 1")
        times = min(self.evaluations, self.epochs)
        right = f"must be from 0 to the number of evaluations, {times}"
        self.require("consistency", 0 <= self.consistency <= times, right)
        for option in ("decay", "decay_per_step"):
            self.require(option, 0 < values[option] <= 1, "must lie in (0, 1]")
        self.require("milestones", all(0 < at < 1 for at in self.milestones), "must be fractions of the run, in (0, 1)")
        self.require("stop_from", 0 <= self.stop_from < 1, "must be a fraction of the run, in [0, 1)")
        self.require("stop_spread", self.stop_spread >= 0, "must not be negative")
