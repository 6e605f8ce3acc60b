"""Options of how long a run is, and what happens on the way."""

from dataclasses import dataclass

from concord.options import OptionGroup, option_values


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(OptionGroup):
    """How long the run is, and what happens on the way."""

    # fmt: off
    epochs: int = 20
    """Passes over the largest training environment."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """When the learning rate is multiplied by --decay, as fractions of the run."""
    decay: float = 0.1
    """What the learning rate is multiplied by at each milestone."""
    decay_per_step: float = 1.0
    """What the learning rate is multiplied by after every step; 1 leaves it as it is."""
    evaluations: int = 20
    """How often all environments are evaluated during the run (at the end in any case)."""
    consistency: int = 0
    """At how many of the evaluations the environments' gradient signs and curvatures are compared; 0 at none."""
    checkpoints: int = 5
    """How many checkpoints are written during the run (at the end in any case)."""
    stop_spread: float = 0.0
    """End the run when the standard deviation of the environments' held-out losses is below this; 0 never does. If it
    is never reached, the model of the evaluation with the least is kept."""
    stop_from: float = 0.1
    """Fraction of the run before --stop-spread is looked at: untrained models have nearly equal losses."""
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of what is switched off."""
        looked_at = {"stop_from": self.stop_spread > 0, "decay": len(self.milestones) > 0}
        return frozenset(name for name, looked in looked_at.items() if not looked)

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        values = option_values(self)
        for option in ("epochs", "evaluations", "checkpoints"):
            self.require(option, values[option] >= 1, "must be at least 1")
        times = min(self.evaluations, self.epochs)
        right = f"at none (0), or at some of the {times} evaluations"
        self.require("consistency", 0 <= self.consistency <= times, right)
        for option in ("decay", "decay_per_step"):
            self.require(option, 0 < values[option] <= 1, "must lie in (0, 1]")
        self.require("milestones", all(0 < at < 1 for at in self.milestones), "fractions of the run, between 0 and 1")
        self.require("stop_from", 0 <= self.stop_from < 1, "a fraction of the run, in [0, 1)")
        self.require("stop_spread", self.stop_spread >= 0, "must not be negative")
