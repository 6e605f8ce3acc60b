"""Options of gradient aggregation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from concord.aggregation import RULES, AndMask
from concord.aggregation.rules_by_name import REGISTRY, compares, has_chance, masks
from concord.errors import InputError
from concord.gradients import ExampleGradient, NonFinite
from concord.hyperparameters import options_of_part
from concord.options import OptionGroup, Role
from concord.training.rule_file import OwnRule

VectorizeOption = Literal["auto", "vmap", "pooled", "one-by-one"]
if TYPE_CHECKING:
    AggregatorOption = str
else:
    AggregatorOption = Literal[("auto", *RULES)]


@dataclass(frozen=True, kw_only=True)
@REGISTRY.add_options(after="rescale")
class AggregatorOptions(OptionGroup):
    """The aggregation of the environments' gradients."""

    role = Role.LEARNING

    # fmt: off
    aggregator: AggregatorOption = "auto"
    """Rule that combines the environments' gradients; auto is mean, the average; it is and-mask with --threshold,
    --significance or --per-example, and in jobs that measurably gain by a mask, unless --objective is given. A rule of
    your own is FILE.py:RULE, a dataclass; its fields become options."""
    significance: float | None = None
    """Largest probability that a component passes the mask by chance, in place of --threshold: τ follows from this
    probability and the number of environments of a step. The default of t-mask is 1e-4."""
    threshold: float | None = None
    """Agreement threshold τ of the masks, in [0, 1]; 1 requires that all environments agree, 0 averages. By default the
    least τ from 0.5 that chance reaches with at most 1e-5, with 18 environments or more; otherwise 0.8."""
    rescale: bool = True
    """Divide each layer's update by the fraction of it that the mask kept."""
    environment_momentum: float = 0.0
    """Decay β of a moving average of each environment's gradients, which replaces the gradients, in [0, 1); 0: none. A
    worker needs additional memory of its environments times the parameters."""
    steps_per_update: int = 1
    """Batches of each environment for an update, all with the same model weights; each batch has a vote."""
    nonfinite: NonFinite = "raise"
    """If an environment's gradient is not finite: end the run (raise), leave the environment out of the step and count
    it (skip), or make the update not finite (propagate)."""
    per_example: bool = False
    """Treat every example as an environment: the aggregator compares the examples of a batch."""
    example_gradient: ExampleGradient = "contribution"
    """Gradient of an example under batch norm: through the example's activations, or of its own loss (slow)."""
    vectorize: VectorizeOption = "auto"
    """Computation of the gradients of a worker's environments: by vmap, pooled in one batch, or one by one; auto takes
    the first of pooled, vmap and one by one that the model supports."""
    # fmt: on

    @property
    def own_rule(self) -> OwnRule | None:
        """The user's own rule that --aggregator names; see :func:`concord.training.rule_file.config_with_rule`."""
        return None

    @property
    def rule_type(self) -> type[Any]:
        """The class of the rule; of auto, that of and-mask."""
        return RULES.get(self.aggregator, AndMask) if self.own_rule is None else self.own_rule.kind

    @property
    def compares(self) -> bool:
        """Whether the rule compares environments, and drops no components."""
        return compares(self.rule_type)

    def unused(self) -> frozenset[str]:
        """The options of other aggregators and of disabled features."""
        fields, built_in = options_of_part(self.rule_type), self.own_rule is None
        by_chance = built_in and (self.significance is not None or "significance" in fields)
        used = {
            "threshold": "threshold" in fields and not by_chance,
            "significance": by_chance and has_chance(self.rule_type),
            "rescale": masks(self.rule_type),
            "example_gradient": self.per_example,
        }
        used |= {option: built_in and option in fields for option in REGISTRY.options}
        return frozenset(name for name, each in used.items() if not each)

    def implied(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """A given threshold replaces the significance."""
        return {"significance": None} if "threshold" in changes else {}

    def check(self) -> None:
        """Validate options; a rule checks its own."""
        if self.own_rule is None and self.aggregator not in ("auto", *RULES):
            raise InputError(f"--aggregator {self.aggregator}: must be one of {', '.join(RULES)}")
        right = self.threshold is None or 0 <= self.threshold <= 1
        self.require("threshold", right, "the agreement threshold must lie in [0, 1]")
        right = self.significance is None or 0 < self.significance <= 1
        self.require("significance", right, "must be a probability above 0 and at most 1")
        beta, steps, examples = self.environment_momentum, self.steps_per_update, self.per_example
        self.require("environment_momentum", 0 <= beta < 1, "must lie in [0, 1)")
        expected = "with --per-example the environments are the examples, which change at each step; give 0"
        self.require("environment_momentum", beta == 0 or not examples, expected)
        expected = "with --environment-momentum pooling gives no averages; give auto, vmap or one-by-one"
        self.require("vectorize", beta == 0 or self.vectorize != "pooled", expected)
        self.require("steps_per_update", steps >= 1, "must be at least 1")
        expected = "with --per-example each example votes already; give 1, and a larger --batch-size"
        self.require("steps_per_update", steps == 1 or not examples, expected)
        expected = "with --environment-momentum all batches of an environment have one vote; give 1"
        self.require("steps_per_update", steps == 1 or beta == 0, expected)
        expected = "compares whole gradients, which --per-example does not form; give mean, and-mask or another mask"
        self.require("aggregator", not (self.compares and examples), expected)
        alike = self.per_example or self.example_gradient == "contribution"
        self.require("example_gradient", alike, "needs --per-example")
