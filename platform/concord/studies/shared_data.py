"""The data of a study's trials, loaded once and kept in Ray's object store: one copy a node for all trials.

Of data that are read a batch at a time, the store has the sources, which read in each trial.

Trials share data unless an option is varied on which the data may depend, which its role says. A job whose
``environments`` reads another option, such as the learning rate, has no shared data.
"""

import dataclasses
import pickle
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from concord.environments import Environment, Environments, HeldOut
from concord.environments.source import ConcatSource, InMemory, joined
from concord.environments.tree import merged
from concord.options import OptionGroup, Role, option_values, options_of
from concord.training import Job, TrainConfig
from concord.training.context import ProcessContext
from concord.training.worker_data import WorkerData, prepare


class _ReadsLearningError(Exception):
    """A job's data depend on an option of the training."""


class _Unreadable:
    """In place of a group of options on which data must not depend."""

    def __getattribute__(self, name: str) -> Any:
        raise _ReadsLearningError(name)


@dataclass(frozen=True)
class _Part:
    """Environments concatenated in one array a leaf, so that a trial's batches are views of it; or their sources."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    data: Any
    in_memory: bool


@dataclass(frozen=True)
class SharedData:
    """The data of a configuration, as references into the object store; made by :func:`share_data`.

    Attributes:
        options: the options on which the data may depend, with values.
        environments: names and purposes, without data.
        left_out: the environment that all runs leave out.
    """

    options: dict[str, Any]
    environments: Environments
    training: _Part
    held_out: _Part | None
    eval_only: _Part | None
    left_out: str | None = None

    def fits(self, config: TrainConfig) -> bool:
        """Whether these are the data of this configuration, with or without the environment that it leaves out."""
        left_out = config.data.leave_out
        if left_out != self.left_out and (self.left_out is not None or self.environments.learn):
            return False
        return self.options.items() <= option_values(config).items()

    def prepared(self) -> WorkerData:
        """The data without a copy; call it on the node that uses them."""
        training = _environments(self.training)
        held_out: Sequence[Environment | None] = (
            _environments(self.held_out) if self.held_out is not None else [None] * len(training)
        )
        eval_only = _environments(self.eval_only) if self.eval_only is not None else []
        pairs = [HeldOut(*pair) for pair in zip(training, held_out, strict=True)]
        return WorkerData(self.environments, pairs, [(environment.name, environment) for environment in eval_only])


def share_data(job: Job[Any], config: TrainConfig, varied: Collection[str]) -> SharedData | None:
    """Load the data into the object store.

    None if the data may depend on a varied option or cannot be sent: then each run loads its own.
    """
    depends = data_options(type(config))
    if not depends.isdisjoint(varied):
        return None
    learning: Any = {name: _Unreadable() for name in learning_groups(type(config))}
    guarded = dataclasses.replace(config, **learning)
    with_guard = dataclasses.replace(job, environments=lambda _: job.environments(guarded))
    try:
        prepared = prepare(with_guard, config.resolve(), ProcessContext())
        held_out = [pair.held_out for pair in prepared.training if pair.held_out is not None]
        return SharedData(
            options={name: value for name, value in option_values(config).items() if name in depends},
            environments=prepared.environments,
            training=_put([pair.training for pair in prepared.training]),
            held_out=_put(held_out) if held_out else None,
            eval_only=_put([environment for _, environment in prepared.eval_only]) if prepared.eval_only else None,
            left_out=config.data.leave_out,
        )
    except (_ReadsLearningError, TypeError, pickle.PicklingError):  # also a source with the options or an open file
        return None


def learning_groups(kind: type[TrainConfig]) -> frozenset[str]:
    """The groups of options on which data do not depend."""
    hints = get_type_hints(kind)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, OptionGroup)}
    return frozenset(name for name, group in groups.items() if group.role is Role.LEARNING)


def data_options(kind: type[TrainConfig]) -> frozenset[str]:
    """The options on which data may depend, besides the environment that is left out."""
    learning, roles = learning_groups(kind), (Role.SCIENCE, Role.SCORING)
    options = [each for each in options_of(kind).values() if each.role in roles and each.name != "leave_out"]
    return frozenset(each.name for each in options if not learning & {*each.groups})


def without(prepared: WorkerData, left_out: str) -> WorkerData:
    """The same data with one training environment turned into the only validation environment."""
    environments = prepared.environments.leaving_out(left_out)
    pair = next(pair for pair in prepared.training if pair.training.name == left_out)
    parts = [part for part in pair if part is not None]
    sources = [part.source for part in parts]
    in_memory = [source for source in sources if isinstance(source, InMemory)]
    joint = merged([source.data for source in in_memory], torch.cat) if len(in_memory) == len(sources) else None
    whole = Environment(left_out, ConcatSource(sources) if joint is None else joint)
    kept = {*environments.test, *environments.monitored}
    others = [(name, environment) for name, environment in prepared.eval_only if name in kept]
    training = [each for each in prepared.training if each is not pair]
    return WorkerData(environments, training, [(left_out, whole), *others])


def _put(environments: Sequence[Environment]) -> _Part:
    import ray

    names, sizes = tuple(environment.name for environment in environments), tuple(map(len, environments))
    sources = [environment.source for environment in environments]
    in_memory = [source for source in sources if isinstance(source, InMemory)]
    if len(in_memory) < len(sources):
        return _Part(names, sizes, ray.put(sources), in_memory=False)
    data = merged([source.data for source in in_memory], lambda each: ray.put(_storable(joined(each))))
    return _Part(names, sizes, data, in_memory=True)


def _storable(values: Tensor) -> Any:
    """The tensor as an array, which Ray reads in place; types that numpy lacks (bfloat16) as bytes."""
    return values.numpy() if values.dtype != torch.bfloat16 else values.view(torch.int16).numpy().view("V2")


def _environments(part: _Part) -> list[Environment]:
    import ray

    if not part.in_memory:
        return [Environment(*pair) for pair in zip(part.names, ray.get(part.data), strict=True)]
    references, structure = pytree.tree_flatten(part.data)
    leaves = [_tensor(array).split(part.sizes) for array in ray.get(references)]
    examples = [pytree.tree_unflatten(each, structure) for each in zip(*leaves, strict=True)]
    return [Environment(*pair) for pair in zip(part.names, examples, strict=True)]


def _tensor(array: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the store's memory is read-only; training only reads it
        if array.dtype.kind == "V":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array)
