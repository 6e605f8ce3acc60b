"""Options of gradient aggregation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from concord.built_in import RULES
from concord.errors import InputError
from concord.gradient_policies import ExampleGradient, NonFinite
from concord.hyperparameters import options_of_part
from concord.options import OptionGroup, Role, did_you_mean

# Rules need PyTorch, which takes a second or two: help and a wrong option do without.
if TYPE_CHECKING:
    from concord.training.rule_file import OwnRule

    AggregatorOption = str
else:
    AggregatorOption = Literal[("auto", *RULES.names)]
VectorizeOption = Literal["auto", "vmap", "pooled", "one-by-one"]


@dataclass(frozen=True, kw_only=True)
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
    conflict_radius: float = 0.4
    """c of cagrad: largest distance of the update from the mean gradient, as a fraction of the mean's norm."""
    byzantine: int = 1
    """Number f of environments that may be arbitrarily wrong (krum); f + 3 environments are needed."""
    selected: int = 1
    """Number m of gradients that krum averages; above 1 the rule is multi-Krum."""
    clip_norm: float = 1.0
    """Largest norm of an environment's gradient (clip)."""
    trimmed_fraction: float = 0.1
    """Fraction of the environments that trimmed-mean leaves out at each end, in [0, 0.5)."""
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
    accumulate: int = 1
    """Pieces of each environment's batch, one after the other, whose gradients are added before the aggregator sees the
    environment: the same step with less memory. Dropout draws other masks."""
    # fmt: on

    @property
    def own_rule(self) -> "OwnRule | None":
        """The user's own rule that --aggregator names; see :func:`concord.training.rule_file.config_with_rule`."""
        return None

    @property
    def rule_type(self) -> type[Any]:
        """The class of the rule; of auto, that of and-mask."""
        if self.own_rule is not None:
            return self.own_rule.kind
        return RULES.kind("and-mask" if self.aggregator == "auto" else self.aggregator)

    @property
    def compares(self) -> bool:
        """Whether the rule compares environments, and drops no components."""
        from concord.aggregation.rules_by_name import compares

        return compares(self.rule_type)

    def unused(self) -> frozenset[str]:
        """The options of other aggregators and of disabled features."""
        from concord.aggregation.rules_by_name import has_chance, masks

        fields, built_in = options_of_part(self.rule_type), self.own_rule is None
        by_chance = built_in and (self.significance is not None or "significance" in fields)
        used = {
            "threshold": "threshold" in fields and not by_chance,
            "significance": by_chance and has_chance(self.rule_type),
            "rescale": masks(self.rule_type),
            "example_gradient": self.per_example,
        }
        used |= {option: built_in and option in fields for option in RULES.all_options()}
        return frozenset(name for name, each in used.items() if not each)

    def implied(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """A given threshold replaces the significance."""
        return {"significance": None} if "threshold" in changes else {}

    def check(self) -> None:
        """Validate options; a rule checks its own."""
        if self.own_rule is None and self.aggregator not in ("auto", *RULES.names):
            near = did_you_mean(self.aggregator, RULES.names)
            raise InputError(f"--aggregator {self.aggregator}: must be one of {', '.join(RULES.names)}{near}")
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
        pieces = self.accumulate
        self.require("accumulate", pieces >= 1, "must be at least 1")
        expected = (
            "with --accumulate pooling forms no gradient to which pieces are added; give auto, vmap or one-by-one"
        )
        self.require("vectorize", pieces == 1 or self.vectorize != "pooled", expected)
        expected = "with --example-gradient loss a batch is no sum of pieces; give 1"
        self.require("accumulate", pieces == 1 or self.example_gradient == "contribution", expected)
        expected = "compares whole gradients, which --per-example does not form; give mean, and-mask or another mask"
        self.require("aggregator", not (self.compares and examples), expected)
        alike = self.per_example or self.example_gradient == "contribution"
        self.require("example_gradient", alike, "needs --per-example")
