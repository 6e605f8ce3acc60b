"""How consistent what a run has learned is across its environments, and across pseudo-environments of its examples."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.utils import _pytree as pytree

from concord.aggregation import default_threshold
from concord.analysis.consistency.environment_losses import EnvironmentLosses, dealt_out
from concord.analysis.consistency.network import NetworkConsistency, Settings, measure, pieces
from concord.environments import Environment
from concord.environments.collection import HeldOut, generator_for
from concord.errors import ArgumentError, InputError
from concord.runs.trained_model import TrainedModel

Split = Literal["train", "held-out"]


@dataclass(frozen=True, kw_only=True)
class DataAsked:
    """On which examples a model's consistency is measured.

    Attributes:
        examples: of each environment, drawn by the seed; all of one that has fewer.
        split: of the training environments, what was trained on or what was held out.
        environments: how many groups the pooled examples are dealt out to at random; 0 keeps the environments.
        seed: of what is drawn.
    """

    examples: int = 256
    split: Split = "train"
    environments: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ArgumentError("examples", self.examples, "must be at least 1")
        if self.environments < 0 or self.environments == 1:
            raise ArgumentError("environments", self.environments, "must be 2 at least, or 0 for those of the job")


def environment_losses(trained: TrainedModel, asked: DataAsked, device: torch.device) -> EnvironmentLosses:
    """The losses of a trained model in its training environments.

    Raises:
        InputError: what is asked for is not there, or the job has fewer than two environments.
    """
    config, job = trained.config, trained.job
    environments = job.job.environments(config)
    names = environments.train
    if config.aggregation.per_example and not asked.environments:
        raise ArgumentError(
            "environments", asked.environments, f"in run {trained.name} every example is an environment; give a number"
        )
    if asked.split == "held-out" and config.data.held_out == 0:
        raise ArgumentError("split", "held-out", f"run {trained.name} held nothing out; give train")
    if len(names) < 2 and not asked.environments:
        raise InputError(f"job {job.name}: has one training environment; consistency compares two at least")
    chosen = [_part(pair, asked.split) for pair in environments.split(names, config.data.held_out, config.run.seed)]
    batches = {each.name: each.take(_places(each, asked)) for each in chosen}
    losses = trained.model.to(device), job.job.risk_of(config)
    if not asked.environments:
        return EnvironmentLosses(*losses, batches)
    count = sum(len(pytree.tree_leaves(batch)[0]) for batch in batches.values())
    if asked.environments > count:
        raise ArgumentError("environments", asked.environments, f"there are {count} examples; give so many at most")
    each, more = divmod(count, asked.environments)
    sizes = {f"group {number}": each + (number < more) for number in range(asked.environments)}
    return EnvironmentLosses(*losses, dealt_out(batches.values(), sizes, generator_for(asked.seed, "groups")))


def _part(pair: HeldOut, split: Split) -> Environment:
    held_out = pair.held_out
    return pair.training if split == "train" or held_out is None else held_out


def _places(environment: Environment, asked: DataAsked) -> torch.Tensor:
    generator = generator_for(asked.seed, environment.name, "consistency")
    return torch.randperm(len(environment), generator=generator)[: asked.examples].sort().values


@dataclass(frozen=True)
class Analysis:
    """What was found of one model.

    Attributes:
        trained: what it was found of.
        measured: on its environments.
        null: on as many pseudo-environments of the same examples; None where only slices were asked for.
        seconds: it took.
        through: the run that slices lead to, if they lead to one.
    """

    trained: TrainedModel
    measured: NetworkConsistency
    null: NetworkConsistency | None
    seconds: float
    through: str | None = None


def analyzed(
    trained: TrainedModel,
    asked: DataAsked,
    settings: Settings,
    device: torch.device,
    through: TrainedModel | None = None,
    advance: Callable[[int, int], None] = lambda *_: None,
) -> Analysis:
    """Measure a model's consistency, and the same on pseudo-environments.

    Args:
        trained: the model.
        asked: on which examples.
        settings: what is measured; its τ is taken from the number of environments.
        device: to compute on.
        through: another model of the same networks, to which slices lead.
        advance: called with how many pieces of work are done, and how many there are.

    Raises:
        InputError: see :func:`environment_losses`; or ``through`` is the same model, or of another network.
    """
    started = time.perf_counter()
    losses = environment_losses(trained, asked, device)
    d = len(losses.names)
    settings = replace(settings, threshold=default_threshold("and-mask", d))
    direction = None if through is None else _difference(losses, through, device)
    null_parts = tuple(part for part in settings.parts if part != "slices")
    of_null = replace(settings, parts=null_parts) if null_parts else None
    total = pieces(settings, d) + (pieces(of_null, d) if of_null else 0)
    done = 0

    def one() -> None:
        nonlocal done
        done += 1
        advance(done, total)

    measured = measure(losses, settings, one, direction)
    null = measure(losses.pseudo_environments(settings.seed), of_null, one) if of_null else None
    return Analysis(trained, measured, null, time.perf_counter() - started, None if through is None else through.name)


def _difference(losses: EnvironmentLosses, through: TrainedModel, device: torch.device) -> torch.Tensor:
    trained = [value for value in through.model.to(device).parameters() if value.requires_grad]
    other = torch.cat([value.detach().reshape(-1) for value in trained])
    if other.shape != losses.solution.shape:
        raise ArgumentError(
            "through", through.name, f"has {len(other)} parameters, and the model {losses.size}; they have to be alike"
        )
    if torch.equal(other, losses.solution):
        raise ArgumentError("through", through.name, "is the same model; a slice needs two different ones")
    return other.to(losses.dtype) - losses.solution
