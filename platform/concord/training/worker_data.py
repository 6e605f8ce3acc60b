"""The data of one training process: its share of the environments, which must fit the options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from concord.environments import Environment, Environments, HeldOut
from concord.environments.summary import DataSummary, summarize
from concord.environments.tree import difference
from concord.errors import InputError, picklable
from concord.objectives import objective_type
from concord.training.context import ProcessContext
from concord.training.job import Job
from concord.training.options import ResolvedTrainConfig

Item = TypeVar("Item")


def share(items: Sequence[Item], process: ProcessContext) -> list[Item]:
    """The items of this process: neighbours; the counts of two processes differ by at most one."""
    each, more = divmod(len(items), process.world_size)
    start = process.rank * each + min(process.rank, more)
    return list(items[start : start + each + (process.rank < more)])


@dataclass(frozen=True)
class WorkerData:
    """The data of one process, split into training and held-out examples.

    Attributes:
        environments: names and purposes of the environments of all processes.
        training: the training environments of this process.
        eval_only: the environments that this process only evaluates.
    """

    environments: Environments
    training: list[HeldOut]
    eval_only: list[tuple[str, Environment]]

    @cached_property
    def summaries(self) -> list[DataSummary]:
        """A summary of each part of this process's data."""
        names = self.environments
        purposes = dict.fromkeys(names.validation, "validation") | dict.fromkeys(names.test, "ood")
        purposes |= dict.fromkeys(names.held_out, "held-out")
        found = []
        for pair in self.training:
            found.append(summarize(pair.training, "train"))
            if pair.held_out is not None:
                found.append(summarize(pair.held_out, "held-out"))
        return found + [summarize(data, purposes.get(name, "monitored")) for name, data in self.eval_only]


def prepare(job: Job[Any], config: ResolvedTrainConfig, process: ProcessContext) -> WorkerData:
    """Load this process's share of the data (InputError if they do not fit the options)."""
    environments = job.environments_of(config).fitted(config.data.held_out, config.run.seed)
    check_environments(config, environments)
    # If examples are environments, the processes share each batch, so each one has all the data.
    own = environments.train if config.aggregation.per_example else share(environments.train, process)
    training = environments.split(own, config.data.held_out, config.run.seed, process.device)
    # The first process keeps the predictions for environments that are left out, so it evaluates all of them.
    left_out = environments.validation if config.data.left_out else ()
    validation = () if left_out else environments.validation
    evaluated = environments.held_out + validation + environments.test + environments.monitored
    names = [*(left_out if process.rank == 0 else ()), *share(evaluated, process)]
    eval_only = [(name, environments[name]) for name in names]
    return WorkerData(environments.only_names(), training, eval_only)


def check_environments(config: ResolvedTrainConfig, environments: Environments) -> None:
    """Refuse too many workers, and one environment if several are compared (InputError)."""
    objective, spread, asked = config.objective.objective, config.schedule.stop_spread, config.schedule.consistency
    if asked and len(environments.train) < 2:
        raise InputError(
            f"--consistency {asked}: compares training environments, and there is only {environments.train[0]}; give 0"
        )
    together, workers = config.data.environments_per_step, config.parallel.workers
    given = config.num_gradients(len(environments.train))
    alone = config.aggregation.compares and given == 1
    config.require("aggregator", not alone, "compares environments, and a step has only one")
    if hasattr(config.aggregation.rule_type, "check_environments"):
        rule: Any = config.rule(len(environments.train))
        rule.check_environments(given)
    compares = objective_type(objective).compares
    if compares or spread > 0:
        option = f"--objective {objective}" if compares else f"--stop-spread {spread}"
        if len(environments.train) < 2:
            raise InputError(f"{option}: compares training environments, and the job has only {environments.train[0]}")
        if compares and together == 1:
            raise InputError(f"--environments-per-step 1: {option} compares environments of a step; give at least 2")
    if config.aggregation.per_example:
        config.require("workers", workers <= config.data.batch_size, "more than the examples of a batch; give fewer")
    elif together:
        own = len(environments.train)
        config.require("environments_per_step", together <= own, f"there are {own} training environments; give fewer")
        alike = together % workers == 0 and own % workers == 0
        config.require("workers", alike, f"must divide the {together} environments of a step, and all {own}")
    elif workers > len(environments.train):
        raise InputError(
            f"--workers {workers}: more than the {len(environments.train)} training environments; "
            "a worker needs at least one of its own"
        )


def on_all_ranks(do: Callable[[], Any], process: ProcessContext) -> Any:
    """Call a function in every process; an InputError in one is raised in all, so that none waits."""
    problem: InputError | None = None
    result = None
    try:
        result = do()
    except InputError as error:
        problem = picklable(error)
    if process.world_size > 1:
        part = result.training[0].training if isinstance(result, WorkerData) else None
        gathered = process.all_gather((problem, None if part is None else (part.name, part.form)))
        problem = next((error for error, _ in gathered if error is not None), None)
        forms = [form for _, form in gathered if form is not None]
        if problem is None and forms:
            differing = (difference(name, form, *forms[0]) for name, form in forms)
            problem = next((InputError(line) for line in differing if line), None)
    if problem is not None:
        raise problem
    return result
