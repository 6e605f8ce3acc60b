"""The data of a study's trials, loaded once and kept in Ray's object store: one copy a node, however many trials."""

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from concord.environments import Environment, Environments, HeldOut
from concord.environments.source import InMemory, joined
from concord.environments.tree import merged
from concord.options import OptionGroup, option_values, options_of
from concord.training import Job, ProcessContext, TrainConfig
from concord.training.loop import WorkerData, prepare

Config = TypeVar("Config", bound=TrainConfig)


@dataclass(frozen=True)
class _Part:
    """Environments one after the other in one array a leaf, so that a trial's batches are views of it."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    data: Any


@dataclass(frozen=True)
class SharedData:
    """The data of a configuration, as references into the object store; made by :func:`share_data`.

    Attributes:
        options: the options that the data depend on, with their values.
        environments: names and purposes, without data.
    """

    options: dict[str, Any]
    environments: Environments
    training: _Part
    held_out: _Part | None
    eval_only: _Part | None

    def fits(self, config: TrainConfig) -> bool:
        """Whether these are the data of this configuration, too."""
        return self.options.items() <= option_values(config).items()

    def prepared(self) -> WorkerData:
        """The data, without copying them; to be called on the node that uses them."""
        training = _environments(self.training)
        held_out: Sequence[Environment | None] = (
            _environments(self.held_out) if self.held_out is not None else [None] * len(training)
        )
        eval_only = _environments(self.eval_only) if self.eval_only is not None else []
        pairs = [HeldOut(*pair) for pair in zip(training, held_out, strict=True)]
        return WorkerData(self.environments, pairs, [(environment.name, environment) for environment in eval_only])


def share_data(job: Job[Any], config: TrainConfig, varied: set[str]) -> SharedData | None:
    """Load the data and put them into the object store.

    Args:
        job: what loads them.
        config: the configuration that every trial starts from.
        varied: the options that differ between trials.

    Returns:
        The shared data, or None where they depend on an option that is varied, or are not in memory: trials then load
        their own.

    Raises:
        InputError: the data do not fit.
    """
    watched, reads = recording(config)
    prepared = prepare(job, watched, ProcessContext())
    depends = reads | {"held_out", "seed"}
    if depends & varied:
        return None
    held_out = [pair.held_out for pair in prepared.training if pair.held_out is not None]
    everything = [*(pair.training for pair in prepared.training), *held_out, *(part for _, part in prepared.eval_only)]
    if not all(isinstance(each.source, InMemory) for each in everything):
        return None
    return SharedData(
        options={name: value for name, value in option_values(config).items() if name in depends - {"workers"}},
        environments=prepared.environments,
        training=_put([pair.training for pair in prepared.training]),
        held_out=_put(held_out) if held_out else None,
        eval_only=_put([environment for _, environment in prepared.eval_only]) if prepared.eval_only else None,
    )


def without(prepared: WorkerData, left_out: str) -> WorkerData:
    """The same data with one training environment not trained on, but the only one to validate on."""
    environments = prepared.environments.leaving_out(left_out)
    pair = next(pair for pair in prepared.training if pair.training.name == left_out)
    parts = [part for part in pair if part is not None]
    whole = Environment(left_out, merged([part.data for part in parts], torch.cat))
    kept = {*environments.test, *environments.observed}
    others = [(name, environment) for name, environment in prepared.eval_only if name in kept]
    training = [each for each in prepared.training if each is not pair]
    return WorkerData(environments, training, [(left_out, whole), *others])


def recording(config: Config) -> tuple[Config, set[str]]:
    """The same configuration, and the set of the options that were read from it so far."""
    reads: set[str] = set()
    return _recording(config, reads), reads


def _recording(group: Any, reads: set[str]) -> Any:
    kind = type(group)
    names = [field.name for field in dataclasses.fields(group)]
    fields = set(names)
    groups = {name for name in fields if isinstance(getattr(group, name), OptionGroup)}
    # What the group made of its options, of any of them.
    derived = [name for name in getattr(group, "__dict__", ()) if name not in fields]

    def read(self: Any, name: str) -> Any:
        if name in fields - groups:
            reads.add(name)
        elif name == "__dict__" or name in derived:
            reads.update(options_of(kind), fields - groups)
        return super(recorder, self).__getattribute__(name)

    # To comparisons and to dataclasses.replace it is of the kind that it stands for.
    itself = property(lambda _: kind)
    recorder: Any = type(
        kind.__name__, (kind,), {"__getattribute__": read, "__doc__": kind.__doc__, "__class__": itself}
    )
    copy = object.__new__(recorder)
    for name in [*names, *derived]:
        value = getattr(group, name)
        object.__setattr__(copy, name, _recording(value, reads) if name in groups else value)
    return copy


def _put(environments: Sequence[Environment]) -> _Part:
    import ray

    return _Part(
        tuple(environment.name for environment in environments),
        tuple(map(len, environments)),
        merged([environment.data for environment in environments], lambda each: ray.put(_storable(joined(each)))),
    )


def _storable(values: Tensor) -> Any:
    """As an array, which Ray reads in place; a type that numpy lacks (bfloat16) goes as its bytes."""
    return values.numpy() if values.dtype != torch.bfloat16 else values.view(torch.int16).numpy().view("V2")


def _environments(part: _Part) -> list[Environment]:
    import ray

    references, structure = pytree.tree_flatten(part.data)
    leaves = [_tensor(array).split(part.sizes) for array in ray.get(references)]
    examples = [pytree.tree_unflatten(each, structure) for each in zip(*leaves, strict=True)]
    return [Environment(*pair) for pair in zip(part.names, examples, strict=True)]


def _tensor(array: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the store's memory cannot be written, and training does not
        if array.dtype.kind == "V":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array)
