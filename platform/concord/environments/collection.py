"""Named environments with their purposes, and checks that their data fit together."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.environments.purposes import environment_names, purposes_of, require_names
from concord.environments.source import ContiguousBuilder, ExampleSource, InMemory, Part, Switching
from concord.environments.tree import Tree, described, difference, is_pair, named_leaves
from concord.errors import ArgumentError, InputError
from concord.weighted import Weighted

if TYPE_CHECKING:  # with pandas
    from concord.environments.table_encoder import TableEncoder
    from concord.environments.table_rows import TargetScale

SPLITS = {
    "train": "the training environments",
    "held_out": "the held-out part of the training environments",
    "validation": "the validation environments",
    "ood": "the test environments",
}
"""Prefixes of metrics over several environments, with their meaning. Monitored environments have their own names."""

Array = Any
"""A tensor, a numpy array, or another argument of ``numpy.asarray``."""


@dataclass(frozen=True, init=False)
class Environment:
    """The examples of one environment.

    ``Environment(name, inputs, targets)``, or ``Environment(name, tree)`` for examples of another form::

        Environment("north", {"input_ids": ids, "attention_mask": mask, "labels": labels})

    Attributes:
        name: its name.
        source: the source of its examples; a tree of tensors becomes :class:`InMemory`.
    """

    name: str
    source: ExampleSource

    def __init__(self, name: str, inputs: Tree | ExampleSource, targets: Tensor | None = None) -> None:
        given = inputs if targets is None else (inputs, targets)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "source", given if isinstance(given, ExampleSource) else InMemory(given))

    @staticmethod
    def of(name: str, inputs: Any, targets: Array | None = None) -> "Environment":
        """Make tensors of the arrays (float64 numpy arrays become float32) and check them.

        Args:
            name: of the environment.
            inputs: of the examples; without ``targets`` a pair of both, a tree of tensors and numpy arrays, or an
                :class:`ExampleSource`.
            targets: of the examples; integers become int64.

        Raises:
            InputError: there are no examples, the leaves disagree in their number, or a leaf is not a tensor. In inputs
                and targets also if a value is not finite; in other trees the risk decides about such values.
        """
        given = inputs if targets is None else (inputs, targets)
        if isinstance(given, ExampleSource):
            return Environment(name, given)
        if _is_pair_of_arrays(given):
            return Environment(name, *_pair(name, *given))
        if isinstance(given, Mapping) and not isinstance(given, dict):
            given = dict(given)  # a tokenizer's result, which torch does not treat as a tree
        leaves, structure = pytree.tree_flatten(given)
        names = list(named_leaves(given))
        for part, leaf in zip(names, leaves, strict=True):
            if not isinstance(leaf, Tensor | np.ndarray):
                raise InputError(f"environment {name}: {part} is of type {type(leaf).__name__}; expected a tensor")
        tensors = [as_tensor(name, part, leaf) for part, leaf in zip(names, leaves, strict=True)]
        counts = {len(tensor) if tensor.ndim else None for tensor in tensors}
        if len(counts) > 1 or None in counts:
            shapes = ", ".join(f"{part} {tuple(each.shape)}" for part, each in zip(names, tensors, strict=True))
            raise InputError(f"environment {name}: {shapes}; all must begin with the same number of examples")
        if counts in (set(), {0}):
            raise InputError(f"environment {name}: it is empty; each environment needs at least one example")
        return Environment(name, pytree.tree_unflatten(tensors, structure))

    @property
    def in_memory(self) -> InMemory:
        """The examples, which are in memory.

        Raises:
            InputError: they are not.
        """
        if not isinstance(self.source, InMemory):
            kind = type(self.source).__name__
            raise InputError(f"environment {self.name}: its examples come from a {kind}; give them in memory")
        return self.source

    @property
    def data(self) -> Tree:
        """A tree of tensors (tuples, lists, dictionaries), each ``(examples, ...)``, such as ``(inputs, targets)``."""
        return self.in_memory.data

    @property
    def form(self) -> dict[str, str]:
        """Shape and type of one example, by the names of the leaves."""
        return described(self.data if isinstance(self.source, InMemory) else self.take(slice(0, 1)))

    @property
    def inputs(self) -> Tensor:
        """``(examples, ...)``.

        Raises:
            InputError: the examples are of another form, or not in memory.
        """
        return self._pair(self.data)[0]

    @property
    def targets(self) -> Tensor:
        """``(examples, ...)``.

        Raises:
            InputError: the examples are of another form.
        """
        self.pairs(slice(0, 1))
        return self.source.targets

    @property
    def total_weight(self) -> float:
        """The sum of its examples' weights; their number, if they have none."""
        data = self.source.data if isinstance(self.source, InMemory) else None
        return float(data.weights.double().sum()) if isinstance(data, Weighted) else float(len(self))

    def __len__(self) -> int:
        return len(self.source)

    def take(self, examples: slice | Tensor) -> Tree:
        """Some of the examples, a tree of the same form."""
        return self.source.take(examples)

    def pairs(self, examples: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Some of the examples, as inputs and targets.

        Raises:
            InputError: the examples are of another form.
        """
        return self._pair(self.take(examples))

    def _pair(self, data: Tree) -> tuple[Tensor, Tensor]:
        if isinstance(data, Weighted):
            return data.inputs, data.targets
        if not is_pair(data):
            found = ", ".join(named_leaves(data))
            raise InputError(
                f"environment {self.name}: it holds {found}, not the inputs and targets that a loss needs; give a risk"
            )
        inputs, targets = data
        return inputs, targets


class HeldOut(NamedTuple):
    """An environment in two parts: one to train on, and one held out of training (None if empty)."""

    training: Environment
    held_out: Environment | None


@dataclass(frozen=True)
class RawRows:
    """How a registered model takes rows of a table, with texts and missing values.

    Attributes:
        encoder: makes numbers of rows.
        example: a few rows, a pandas frame.
        outputs: the names of the classes, or of the one number.
        target_scale: of the number; None for classes.
        network: makes of the trained network one of rows as the encoder gives them; None if it takes these.
    """

    encoder: "TableEncoder"
    example: Any
    outputs: tuple[str, ...]
    target_scale: "TargetScale | None" = None
    network: Callable[[nn.Module], nn.Module] | None = None


class Environments:
    """Named environments with their purposes; the data are made one environment at a time.

    Args:
        load: maps a name to that environment's inputs and targets, or to its tree of tensors, see
            :class:`Environment`. It is called in the process that owns the environment, so a generator makes its data
            there and nothing is sent. The same name must always give the same data.
        train: the environments to train on.
        validation: whole environments to select models by, held out of training.
        test: whole environments to report on; they select nothing.
        monitored: further environments to report on, each under its own name. They may be parts of the training data.
        held_out: whole environments to select evaluations by, in place of a part of each training environment; see
            :meth:`holding_out`.
        version: text that differs when the data do, so that results on other data are not mixed up, or a function that
            gives it, called when it is needed first. None if the options alone decide the data.

    Attributes:
        learn: whether :meth:`fitted` depends on the training rows, so that leaving an environment out changes it.
        classes: the names of the classes in the order of their numbers, if the data name them.
        target_scale: of targets that are standardized numbers.
        rows: the places of an environment's examples in the data, by its name, int64 ``(examples,)``; an environment
            that is missing has its examples in order.
        clusters: of these examples what each belongs to, such as a patient, text ``(examples,)``, if the data name it.

    Raises:
        InputError: there is no training environment, a name is no text or appears twice, or a monitored environment has
            the name of other metrics.
    """

    classes: tuple[str, ...] | None = None
    target_scale: "TargetScale | None" = None
    rows: Mapping[str, Any] = MappingProxyType({})
    clusters: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        load: Callable[[str], Any],
        train: Iterable[str],
        validation: Iterable[str] = (),
        test: Iterable[str] = (),
        monitored: Iterable[str] = (),
        version: str | Callable[[], str | None] | None = None,
        held_out: Iterable[str] = (),
    ) -> None:
        self._version = version
        self.learn = False
        self._load = load
        self.train = environment_names("train", train)
        self.held_out = environment_names("held_out", held_out)
        self.validation = environment_names("validation", validation)
        self.test = environment_names("test", test)
        self.monitored = environment_names("monitored", monitored)
        if not self.train:
            raise InputError("environments: there is no training environment")
        seen: set[str] = set()
        for name in self.names:
            if name in seen:
                raise InputError(f"environment {name}: is named twice; give it one purpose")
            seen.add(name)
        for name in self.monitored:
            if name in SPLITS:
                raise InputError(
                    f"environment {name}: monitored environments are reported by name, and {name}_loss is the loss of "
                    f"{SPLITS[name]}; rename it"
                )

    @staticmethod
    def from_arrays(
        arrays: Mapping[str, Any], validation: Sequence[str] = (), test: Sequence[str] = ()
    ) -> "Environments":
        """Environments from existing data: ``{name: (inputs, targets)}``, or ``{name: tree}``.

        ``validation`` and ``test`` name their environments; all others train.

        Raises:
            InputError: a name is not among the arrays, or the data are invalid.
        """
        checked = {name: Environment.of(name, arrays[name]) for name in environment_names("arrays", arrays)}
        purposes = purposes_of(checked, validation, test)
        _require_alike(list(checked.values()))
        return Environments(lambda name: checked[name].data, **purposes, version=None)

    @property
    def version(self) -> str | None:
        """Text that differs when the data do; None if the options alone decide the data."""
        if callable(self._version):
            self._version = self._version()
        return self._version

    def leaving_out(self, *names: str) -> "Environments":
        """The same data with some environments, to train on or held out whole, turned into the only validation ones.

        Raises:
            InputError: they are not among these, or all training environments.
        """
        require_names(names, self.to_leave_out)
        train = [each for each in self.train if each not in names]
        left_out = [each for each in self.to_leave_out if each in names]
        held_out = [each for each in self.held_out if each not in names]
        fewer = Environments(self._load, train, left_out, self.test, self.monitored, self._version, held_out)
        fewer.classes = self.classes
        return fewer

    def holding_out(self, fraction: float, seed: int) -> "Environments":
        """The same data with this fraction of the training environments held out whole, at least two if one is left.

        The seed and the names choose them, whatever the order of the names and the other environments.
        """

        def drawn(name: str) -> int:
            return int(torch.randint(2**62, (), generator=generator_for(seed, name, "held out whole")))

        count = min(max(round(fraction * len(self.train)), 2), len(self.train) - 1)
        held_out = sorted(self.train, key=drawn)[:count]
        fewer = copy.copy(self)
        fewer.train = tuple(name for name in self.train if name not in held_out)
        fewer.held_out = tuple(name for name in self.train if name in held_out)
        return fewer

    @property
    def to_leave_out(self) -> tuple[str, ...]:
        """The environments that can be left out: those to train on, and those held out whole."""
        return self.train + self.held_out

    @property
    def raw(self) -> RawRows | None:
        """The encoding of a table's rows, if the data are a table."""
        return None

    def fitted(self, fraction: float, seed: int) -> "Environments":
        """The environments with what training rows that are not held out decide, such as scales and categories.

        ``fraction`` is that of :meth:`split`.
        """
        return self

    def units(self, name: str) -> Tensor | None:
        """What each example of an environment belongs to, such as a patient, int64 ``(examples,)`` from 0; None if
        each stands for itself. A unit is held out as a whole.
        """
        return None

    @staticmethod
    def none() -> "Environments":
        """No environments, for a job that has none."""
        found = Environments(_not_here, ["none"])
        found.train = ()
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """All names: training, held out whole, validation, test, monitored."""
        return sum(self.by_purpose().values(), ())

    def by_purpose(self) -> dict[str, tuple[str, ...]]:
        """The names of each purpose, by argument of this class."""
        names = ("train", "held_out", "validation", "test", "monitored")
        return {name: getattr(self, name) for name in names}

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Environment:
        """The data of one environment.

        Raises:
            InputError: there is no such environment, or its data do not fit :meth:`Environment.of`.
        """
        require_names([name], self.names)
        return Environment.of(name, self._load(name))

    def load(self, names: Iterable[str]) -> list[Environment]:
        """The data of these environments, checked to be alike in shape and type of one example."""
        environments = [self[name] for name in names]
        _require_alike(environments)
        return environments

    def split(
        self, names: Sequence[str], fraction: float, seed: int, device: torch.device | str = "cpu"
    ) -> list["HeldOut"]:
        """These environments with a part of each held out, see :func:`split_held_out`; each example is in memory once.

        Training examples are contiguous on the device, so that :class:`BatchStream` does not copy them.
        One environment is loaded at a time. If a source is not in memory, none is moved. If environments are held out
        whole, no part of these is.
        """
        fraction = self.fraction_of_examples(fraction)
        loaded = [self[names[0]]]
        if not isinstance(loaded[0].source, InMemory):
            return [split_held_out(environment, fraction, seed) for environment in self.load(names)]
        if len(names) == 1 and fraction == 0:
            (alone,) = loaded
            return [HeldOut(Environment(alone.name, pytree.tree_map(lambda leaf: leaf.to(device), alone.data)), None)]
        laid, held_out = ContiguousBuilder(len(names)), []
        form: dict[str, str] = {}
        for name in names:
            whole = loaded.pop() if loaded else self[name]  # frees the first as early as the others
            if not isinstance(whole.source, InMemory):
                return [split_held_out(environment, fraction, seed) for environment in self.load(names)]
            form = form or whole.form
            _require_form(whole, names[0], form)
            kept, held = held_out_places(name, len(whole), fraction, seed, self.units(name))
            laid.add(whole.in_memory, kept)
            held_out.append(None if held is None else Environment(name, whole.take(held)))
        training = [Environment(*each) for each in zip(names, laid.moved(device), strict=True)]
        return [HeldOut(*pair) for pair in zip(training, held_out, strict=True)]

    def fraction_of_examples(self, fraction: float) -> float:
        """The fraction of each training environment that is held out: 0 if environments are held out whole."""
        return 0.0 if self.held_out else fraction

    def only_names(self) -> "Environments":
        """The same names and purposes, without the function that loads the data, which may hold data."""
        names = Environments(_not_here, **self.by_purpose(), version=self._version)
        names.learn, names.classes, names.target_scale = self.learn, self.classes, self.target_scale
        return names


def split_held_out(environment: Environment, fraction: float, seed: int, units: Tensor | None = None) -> HeldOut:
    """Hold out a part of an environment's examples, chosen at random by the seed and the environment's name.

    At least one example is left to train on, and at least one is held out if the fraction is above 0. In a
    :class:`Switching` source the same positions are held out before and after. See :meth:`Environments.units`.

    Raises:
        InputError: the fraction is not in [0, 1), or there is only one example.
    """
    kept, held = held_out_places(environment.name, len(environment), fraction, seed, units)
    if kept is None or held is None:
        return HeldOut(environment, None)
    return HeldOut(*(Environment(environment.name, _at_places(environment.source, each)) for each in (kept, held)))


def _at_places(source: ExampleSource, places: Tensor) -> Tree | ExampleSource:
    """The examples at these places."""
    if isinstance(source, InMemory):
        return source.take(places)
    if isinstance(source, Switching):
        before, after = (Part(each, places) for each in (source.before, source.after))
        return Switching(before, after, source.epochs)
    return Part(source, places)


def held_out_places(
    name: str, examples: int, fraction: float, seed: int, units: Tensor | None = None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The positions of an environment's training examples, and of held-out ones; None for a fraction of 0.

    Of units, whole ones are drawn until the number of their examples is nearest to the fraction.
    """
    if not 0 <= fraction < 1:
        raise ArgumentError("fraction", fraction, "the held-out fraction must lie in [0, 1)")
    if fraction == 0:
        return None, None
    if examples < 2:
        advice = "join it with others (a table's numbers: --environment-bins), or give 0"
        raise ArgumentError(
            "held_out", fraction, f"environment {name} has one example, which cannot be split; {advice}"
        )
    generator = generator_for(seed, name, "held out")
    if units is not None:
        order = torch.randperm(int(units.max()) + 1, generator=generator)
        if len(order) < 2:
            expected = (
                f"environment {name} has one unit of --cluster-by, which cannot be split; join it with others, or"
            )
            raise ArgumentError("held_out", fraction, f"{expected} give 0")
        reached = units.bincount()[order].cumsum(0)[:-1]
        held = torch.isin(units, order[: int((reached - fraction * examples).abs().argmin()) + 1])
        return (~held).nonzero().squeeze(1), held.nonzero().squeeze(1)
    count = min(max(round(fraction * examples), 1), examples - 1)
    order = torch.randperm(examples, generator=generator)
    return order[count:].sort().values, order[:count].sort().values


def _not_here(name: str) -> Any:
    raise AssertionError(f"environment {name} was loaded already")


def some_examples(environment: Environment, count: int, seed: int, purpose: str) -> Tree:
    """At most this number of an environment's examples, drawn at random: the first may all be of one class."""
    order = torch.randperm(len(environment), generator=generator_for(seed, environment.name, purpose))
    return environment.take(order[:count].sort().values)


def generator_for(*key: int | str) -> torch.Generator:
    """A random generator that depends on the key alone, not on the process or on earlier draws."""
    # Text enters by its bytes: hash() of a string differs between processes.
    words = [part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in key]
    seed = np.random.SeedSequence(words).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed) >> 1)


def _is_pair_of_arrays(data: Any) -> bool:
    """Whether these are inputs and targets, each one array."""
    return type(data) in (tuple, list) and len(data) == 2 and not any(map(_is_tree, data))


def _is_tree(data: Any) -> bool:
    # A list of rows is an array, even if the rows are arrays.
    return isinstance(data, Mapping) or (
        isinstance(data, tuple) and any(isinstance(part, Tensor | np.ndarray | Mapping) for part in data)
    )


def _pair(name: str, inputs: Array, targets: Array) -> tuple[Tensor, Tensor]:
    inputs, targets = as_tensor(name, "inputs", inputs), as_tensor(name, "targets", targets)
    if not targets.is_floating_point():
        targets = targets.long()
    if inputs.ndim == 0 or len(inputs) == 0:
        raise InputError(f"environment {name}: it is empty; each environment needs at least one example")
    if targets.ndim == 0 or len(inputs) != len(targets):
        found = len(targets) if targets.ndim else 0
        raise InputError(f"environment {name}: {len(inputs)} inputs and {found} targets; the numbers must be equal")
    for part, values in (("inputs", inputs), ("targets", targets)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            wrong = torch.isfinite(values).logical_not().nonzero()
            place = tuple(wrong[0].tolist())
            at = f"{len(wrong)} of {values.numel()}: {part}[{', '.join(map(str, place))}] is {values[place].item()}"
            raise InputError(f"environment {name}: its {part} hold values that are not finite, {at}")
    return inputs, targets


def as_tensor(name: str, part: str, values: Array) -> Tensor:
    """This part of an environment as a tensor without a gradient; refuse other values than numbers (InputError)."""
    if (kind := without_numbers(values)) is not None:
        raise InputError(f"environment {name}: its {part} are {kind}")
    if isinstance(values, list | tuple) and any(isinstance(each, Tensor | np.ma.MaskedArray) for each in values):
        values = [as_tensor(name, part, each).numpy(force=True) for each in values]
    if isinstance(values, Tensor):
        values = values.detach()
    else:
        try:
            array = np.asarray(values)
        except ValueError as error:  # rows of different lengths
            raise InputError(f"environment {name}: its {part} cannot become an array ({error})") from error
        if array.dtype == object or array.dtype.kind not in "biuf":
            raise InputError(f"environment {name}: its {part} are of type {array.dtype}; expected numbers")
        if array.dtype.kind == "f" and array.dtype.itemsize > 4:
            array = array.astype(np.float32)
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:
            array = array.astype(np.int64)
        # A tensor takes neither another byte order nor read-only memory, such as Arrow's.
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        values = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    tensor: Tensor = values
    return tensor


def without_numbers(values: Array) -> str | None:
    """Why an array has no number in each place, and what to give; None if it has."""
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_nested:
            kind = "nested" if values.is_nested else str(values.layout).removeprefix("torch.")
            return f"a {kind} tensor; give a dense one, such as values.to_dense()"
        if values.is_quantized or values.is_complex():
            return f"of type {str(values.dtype).removeprefix('torch.')}; expected real numbers"
        return None
    if isinstance(values, np.ma.MaskedArray) and (count := np.sum(values.mask)):
        masked = f"a masked array with {count} masked values, which have no number"
        return f"{masked}; give values.filled(…), or leave these examples out"
    if type(values).__module__.startswith("scipy.sparse"):
        return f"a sparse {type(values).__name__} of SciPy; give values.toarray()"
    return None


def _require_alike(environments: Sequence[Environment]) -> None:
    for environment in environments[1:]:
        first = environments[0]
        _require_form(environment, first.name, first.form)


def _require_form(environment: Environment, first: str, form: dict[str, str]) -> None:
    """Refuse examples of another form than the first environment's (InputError)."""
    found = difference(environment.name, environment.form, first, form)
    if found is not None:
        raise InputError(found)
