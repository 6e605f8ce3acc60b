"""All options of a training run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from concord.built_in import OBJECTIVES
from concord.hyperparameters import options_of_part
from concord.options import group, option_values, options_of
from concord.training.options.aggregator_options import AggregatorOptions
from concord.training.options.objective_options import ObjectiveOptions
from concord.training.options.option_groups import DataOptions, OptimizerOptions, ParallelOptions, ScheduleOptions
from concord.training.options.run_options import ResolvedConfig, RunConfig

if TYPE_CHECKING:
    from concord.aggregation import Rule

ASK_FOR_A_MASK = frozenset({"threshold", "significance", "per_example"})
"""The options of masks: ``--aggregator auto`` is one if any of them is given."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """One training run. A job adds options of its own as fields of a derived class, and changes defaults by giving an
    instance: ``Job(…, config=MyConfig().with_options(lr=2e-3, epochs=80))``.

    Attributes:
        auto_aggregator: the rule that ``auto`` is for the objective erm if no option asks for a mask: the average,
            unless measured results of the job show that another one is better.
    """

    auto_aggregator: ClassVar[str] = "mean"

    data: DataOptions = group(DataOptions)
    objective: ObjectiveOptions = group(ObjectiveOptions)
    aggregation: AggregatorOptions = group(AggregatorOptions)
    optimizer: OptimizerOptions = group(OptimizerOptions)
    schedule: ScheduleOptions = group(ScheduleOptions)
    parallel: ParallelOptions = group(ParallelOptions)

    if TYPE_CHECKING:

        def resolve(self) -> "ResolvedTrainConfig":
            """These options with the values in use."""

    def derived_options(self) -> dict[str, Any]:
        """What ``auto`` stands for (aggregator, device), and the defaults of the penalty's weight and of β₁."""
        weight, beta1 = self.objective.penalty_weight, self.optimizer.beta1
        kind = OBJECTIVES.kind(self.objective.objective)
        weight = kind.default_weight if weight is None else weight
        averaged = self.aggregation.environment_momentum > 0 and not kind.coupled
        if beta1 is None:
            beta1 = 0.0 if averaged else self.optimizer.betas[0]
        chosen: dict[str, Any] = {"penalty_weight": weight, "beta1": beta1, "device": device_of(self)}
        if self.aggregation.aggregator == "auto":
            chosen["aggregator"] = self._auto_rule()
        return super().derived_options() | chosen

    def _auto_rule(self) -> str:
        if self.objective.objective != "erm":
            return "mean"
        values = option_values(self.aggregation)
        given = any(values[name] is not None and values[name] is not False for name in ASK_FOR_A_MASK)
        return "and-mask" if given else self.auto_aggregator

    def implied(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """In a job with a mask of its own, a given objective, erm as well, is averaged if nothing asks for a mask."""
        masked = self.auto_aggregator != "mean" and self.aggregation.aggregator == "auto"
        undecided = masked and not changes.keys() & {"aggregator", *ASK_FOR_A_MASK}
        return {"aggregator": "mean"} if "objective" in changes and undecided else {}

    def strictness(self, environments: int) -> dict[str, float]:
        """The rule's default significance or threshold with this number of training environments, where it has one.

        None of them if one is given. Call it on resolved options, as :meth:`rule`.
        """
        from concord.aggregation import default_threshold

        used = self.aggregation
        fields, built_in = options_of_part(used.rule_type), used.own_rule is None
        if built_in and used.significance is not None:
            return {}
        if built_in and "significance" in fields:
            return {"significance": fields["significance"].default}
        if used.threshold is not None:
            return {}
        return {"threshold": default_threshold(used.aggregator, self.num_gradients(environments))}

    def unused(self) -> frozenset[str]:
        """Also the options for gradients of environments, if the objective has one gradient of all; of a baseline all
        that steps would need."""
        if self.baseline is not None:
            of_steps = (self.aggregation, self.objective, self.optimizer, self.schedule)
            return super().unused() | {name for group in of_steps for name in options_of(type(group))}
        coupled = OBJECTIVES.kind(self.objective.objective).coupled
        return super().unused() | ({"environment_momentum"} if coupled else set())

    def sources(self) -> dict[str, str]:
        """The text of the rule's file, for the user's own rule."""
        rule = self.aggregation.own_rule
        return super().sources() | ({} if rule is None else {rule.file.file_name: rule.file.source})

    @property
    def method(self) -> str:
        """The method, for the run's name: a baseline, the aggregator, the objective, or both if both are chosen."""
        if self.baseline is not None:
            return self.baseline
        chosen = self.aggregation.aggregator.rpartition(":")[2]  # the rule's name in FILE.py:RULE
        if self.objective.objective == "erm":
            return chosen
        return self.objective.objective if chosen == "mean" else f"{self.objective.objective}-{chosen}"

    def num_gradients(self, environments: int) -> int:
        """The number of gradients that the aggregator compares at an update, for this number of training environments.

        Each of several batches of an environment counts, although they share the environment's shortcuts.
        """
        together = (self.data.environments_per_step or environments) * self.aggregation.steps_per_update
        return together * (self.data.batch_size if self.aggregation.per_example else 1)

    def rule(self, environments: int = 1) -> "Rule":
        """The rule of resolved options; the default threshold follows from the number of training environments."""
        from concord.aggregation import aggregator_at_chance
        from concord.aggregation.rules_by_name import rule_with

        options, values = self.aggregation, option_values(self) | self.strictness(environments)
        if options.own_rule is not None:
            return options.own_rule.build(values)
        if (significance := values["significance"]) is not None:
            return aggregator_at_chance(options.aggregator, significance, self.num_gradients(environments))
        rule: Rule = rule_with(options.rule_type, values)
        return rule

    def gpu_request(self) -> tuple[float, str]:
        """One for each worker, with --device cuda."""
        least = self.parallel.least_workers
        want = f"{least} workers want a GPU each" if least > 1 else "one worker wants a GPU"
        return float(least) * (device_of(self) == "cuda"), f"--device cuda: {want}"

    def cpu_request(self) -> tuple[float, str]:
        """One for each worker with --min-workers or --wait-for-resources; otherwise workers share the CPUs."""
        workers, least = self.parallel.workers, self.parallel.min_workers
        if least is not None:
            return least, f"--min-workers {least}: each takes a CPU"
        if self.run.wait_for_resources:
            return workers, f"--workers {workers}: with --wait-for-resources each takes a CPU"
        return 1, f"--workers {workers}: at least one CPU is needed"

    def check(self) -> None:
        """Validate options and their combinations; a job may add checks (InputError)."""
        from concord.aggregation.rules_by_name import has_chance, rule_with, without_chance

        super().check()
        data, name, per_example = self.data, self.objective.objective, self.aggregation.per_example
        in_use = self.resolve()
        resolved, rule = in_use.aggregation, in_use.aggregation.aggregator
        all_at_once = data.environments_per_step == 0
        fixed = self.parallel.min_workers is None or all_at_once
        expected = "batches depend on the number of workers; give --environments-per-step 0"
        self.require("min_workers", fixed, expected)
        kept = all_at_once or self.aggregation.environment_momentum == 0
        self.require(
            "environment_momentum", kept, "with --environments-per-step environments change at each step; give 0"
        )
        self.require(
            "environments_per_step", all_at_once or not per_example, "with --per-example every step takes all; give 0"
        )
        alone = per_example and data.batch_size == 1
        self.require("batch_size", not alone, "with --per-example a batch needs at least 2 examples to compare")
        compared = self.schedule.stop_spread == 0 or data.held_out > 0
        self.require("stop_spread", compared, "needs held-out examples; give --held-out above 0")
        asked = self.schedule.consistency > 0
        self.require("consistency", not (asked and per_example), "with --per-example examples are environments; give 0")
        kind = OBJECTIVES.kind(name)
        alone = not kind.compares or not per_example
        self.require("objective", alone, "compares environments; with --per-example give erm")
        by_rows = data.environment_weights == "rows"
        self.require("environment_weights", not by_rows or name == "erm", f"--objective {name} weighs them; give equal")
        self.require("environment_weights", not (by_rows and per_example), "with --per-example all count alike")
        coupling = "--environment-weights rows" if by_rows else f"--objective {name}"
        coupled, averages, every = kind.coupled or by_rows, kind.averages and not by_rows, kind.every or by_rows
        accumulate, what = self.aggregation.accumulate, f"{coupling} is no mean over the examples of a batch"
        self.require("accumulate", accumulate == 1 or averages, f"{what}, so pieces do not add up to it; give 1")
        self.require("accumulate", accumulate <= data.batch_size, f"a batch has {data.batch_size} examples; give fewer")
        if coupled:
            self.require("compile", not self.optimizer.compile, f"{coupling} couples the environments; leave it out")
            averaged = f"{coupling} couples the environments, so there is one gradient"
            self.require("aggregator", rule == "mean", f"{averaged}; give mean")
            self.require("steps_per_update", self.aggregation.steps_per_update == 1, f"{averaged}; give 1")
            right = self.aggregation.nonfinite != "skip"
            self.require("nonfinite", right, f"{averaged} and no environment can be left out; give raise or propagate")
        self.require("environments_per_step", all_at_once or not every, f"{coupling} keeps all environments; give 0")
        averages_over_time = by_rows and self.aggregation.environment_momentum > 0
        self.require("environment_momentum", not averages_over_time, f"{coupling} has one gradient of all; give 0")
        if self.aggregation.significance is not None:
            right = resolved.own_rule is None and has_chance(resolved.rule_type)
            self.require("significance", right, without_chance(rule))
            expected = "steps of --optimizer temporal-and-mask are not environments; give --temporal-threshold"
            self.require("significance", self.optimizer.optimizer != "temporal-and-mask", expected)
        if self.aggregation.own_rule is not None:
            self.aggregation.own_rule.check(in_use.rule())
        else:  # the rule checks its own options
            rule_with(resolved.rule_type, option_values(resolved), shared=False)


if TYPE_CHECKING:

    class ResolvedTrainConfig(TrainConfig, ResolvedConfig):
        """Options of :meth:`TrainConfig.resolve`; only a type checker tells them from options as given."""

else:
    ResolvedTrainConfig = TrainConfig


def parallel_of(config: RunConfig) -> ParallelOptions:
    """The worker options of a run; a job with a loop of its own has none."""
    return config.parallel if isinstance(config, TrainConfig) else ParallelOptions()


def device_of(config: RunConfig) -> Literal["cpu", "cuda"]:
    """The device of a run's workers, also for ``auto``; a job with a loop of its own has the CPU's."""
    if not isinstance(config, TrainConfig):
        return "cpu"
    if config.parallel.device != "auto":
        return config.parallel.device
    if config.run.on_cluster:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.device_count() >= config.parallel.least_workers else "cpu"
