"""A training step as one CUDA graph: the host starts one operation a step in place of hundreds.

A recorded step is the same operations on the same memory, whatever its batch's values: the batch is copied to where it
was when the step was recorded; parameters, gradients and an optimizer's state stay where they are; the host reads
nothing on the way. The first steps of a form are ordinary ones. The next one is recorded as well, and its graph is used
from then on if a first replay gives what the ordinary step gave. What cannot be recorded is computed the ordinary way,
and a line says why, once.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from concord.aggregation import Weighting
from concord.aggregation.weighting import name_of
from concord.errors import InputError, first_line
from concord.gradients.layout import trainable
from concord.gradients.nonfinite import random_state, set_random_state
from concord.gradients.risk import Batch
from concord.gradients.step import Aggregation, EnvironmentStep
from concord.logs import info

T = TypeVar("T")

# Ordinary steps of a form before it is recorded: they make an optimizer's state, and choose algorithms.
_WARM_UP = 3
# How far a replay may be from the ordinary step, as the mean over tensors of the error in parts of the change. Both
# round alike; a gradient that is rounding alone may have another sign.
_AGREES = 0.1


class Recordable(ABC):
    """A step of a model that fills ``parameter.grad``, and may do more.

    Attributes:
        model: the model.
        aggregation: the rule and its options.
        checks: whether a step whose gradients are not finite is to be done again the ordinary way, which refuses it or
            leaves environments out; the host then waits for each step.
    """

    model: nn.Module
    aggregation: Aggregation

    @property
    def checks(self) -> bool:
        """See the class."""
        return self.aggregation.policy != "propagate"

    def obstacle(self) -> str | None:
        """Why the step cannot be recorded, if that is known after some steps."""
        rule = self.aggregation.rule
        if isinstance(rule, Weighting):
            return f"{name_of(rule)} reads the gradients' inner products on the host"
        if getattr(rule, "draws", ()):
            return f"{name_of(rule)} draws by the step's number"
        if self.aggregation.scaler is not None and self.aggregation.scaler.is_enabled():
            return "the host reads the scale of the loss"
        if self.aggregation.environment_momentum > 0:
            return "environment_momentum follows the environments' names"
        return None

    @abstractmethod
    def ordinary(self, batch: Batch, at: int) -> EnvironmentStep:
        """The step of number ``at``, not by a graph."""

    @abstractmethod
    def recorded(self, batch: Batch) -> EnvironmentStep:
        """The same as operations that depend on no value; what is not finite reaches the gradients."""

    def constants(self) -> Hashable:
        """What a recording holds beside the batch's form: if it changes, the step is recorded anew."""
        return tuple(module.training for module in self.model.modules())

    def read(self) -> list[Tensor]:
        """The tensors that a step reads, beside the batch and what it changes."""
        return list(self.model.parameters())

    def changed(self) -> list[Tensor]:
        """The tensors that a step changes in place."""
        return list(self.model.buffers())

    def trained(self) -> list[nn.Parameter]:
        """The parameters whose ``grad`` the step fills."""
        return list(trainable(self.model).values())


class _Recording(NamedTuple):
    key: Hashable
    inputs: list[Tensor]
    replay: Callable[[], object]
    step: EnvironmentStep
    gradients: list[Tensor | None]


class StepGraph:
    """Calls of a step, by a graph as soon as there is one.

    Args:
        device: of the step.

    Attributes:
        captured: whether there is a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recording: _Recording | None = None
        self._key: Hashable = None
        self._steps = 0  # of this key, the ordinary way
        self._refused = False
        self._said: set[str] = set()

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._recording is not None

    def __call__(self, step: Recordable, batch: Batch, at: int) -> EnvironmentStep:
        """The step of number ``at``, always the same one."""
        if not (self._refused or can_capture(self._device)):
            self._refuse("the model is not on a GPU")
        if self._refused:
            return step.ordinary(batch, at)
        leaves, structure = pytree.tree_flatten(batch)
        forms = tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)
        places = tuple(each.data_ptr() for each in (*step.read(), *step.changed()))
        key = (structure, forms, step.constants(), places)
        if self._recording is not None and key == self._recording.key:
            return self._replayed(step, self._recording, batch, leaves, at)
        if self._recording is not None:
            self._say("its batch, learning rate, mode or memory is not that of the captured one")
        self._steps = self._steps + 1 if key == self._key else 1
        self._key = key
        if self._steps > _WARM_UP and self._may_be_recorded(step):
            return self._first(step, batch, leaves, key, at)
        with aside(self._device):
            return step.ordinary(batch, at)

    def _may_be_recorded(self, step: Recordable) -> bool:
        if (reason := step.obstacle()) is not None:
            self._refuse(reason)
        return reason is None

    def _first(self, step: Recordable, batch: Batch, leaves: list[Tensor], key: Hashable, at: int) -> EnvironmentStep:
        """An ordinary step, whose recording is kept if a replay gives the same."""
        self._recording = None  # its memory is free before the next one takes some
        changed, parameters = step.changed(), step.trained()
        random, before = random_state(self._device), _copies(changed)
        recording: _Recording | None = None
        try:
            recording = self._recorded(step, batch, leaves, key)
        except Exception as error:  # of any kind: from the model, the loss, CUDA
            self._refuse(first_line(error))
        _put(changed, before)
        set_random_state(self._device, random)
        ordinary = step.ordinary(batch, at)
        if recording is None:
            return ordinary
        after, random_after = _copies(changed), random_state(self._device)
        gradients = [parameter.grad for parameter in parameters]
        _put(changed, before)
        set_random_state(self._device, random)
        _replay(recording, leaves)
        if recording.step.finite is not None and not bool(recording.step.finite):
            pass  # nothing to compare: the next step is recorded again
        elif _agree(changed, after, before) and _agree(recording.gradients, gradients):
            self._recording = recording
        else:
            self._refuse("a replay gave something else than the ordinary step")
        _put(changed, after)
        set_random_state(self._device, random_after)
        return ordinary

    def _recorded(self, step: Recordable, batch: Batch, leaves: list[Tensor], key: Hashable) -> _Recording:
        inputs = [leaf.clone() for leaf in leaves]
        static = pytree.tree_unflatten(inputs, pytree.tree_structure(batch))

        def work() -> tuple[EnvironmentStep, list[Tensor | None]]:
            return step.recorded(static), [parameter.grad for parameter in step.trained()]

        replay, (result, gradients) = capture(work, self._device)
        return _Recording(key, inputs, replay, result, gradients)

    def _replayed(
        self, step: Recordable, recording: _Recording, batch: Batch, leaves: list[Tensor], at: int
    ) -> EnvironmentStep:
        before = _copies(step.changed()) if step.checks else []
        _replay(recording, leaves)
        if step.checks and not bool(recording.step.finite):
            _put(step.changed(), before)
            return step.ordinary(batch, at)
        for parameter, gradient in zip(step.trained(), recording.gradients, strict=True):
            parameter.grad = gradient
        found = recording.step
        finite = None if found.finite is None else found.finite.clone()
        losses, kept, weights = found.losses.clone(), found.kept_fraction.clone(), found.weights.clone()
        return found._replace(losses=losses, kept_fraction=kept, weights=weights, finite=finite)

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            info(f"a step is computed without a CUDA graph: {reason}")


def can_capture(device: torch.device) -> bool:
    """Whether work on this device can be captured."""
    return device.type == "cuda"


def capture(work: Callable[[], T], device: torch.device) -> tuple[Callable[[], object], T]:
    """Capture work as a CUDA graph, after a run that finds what the host reads.

    Returns:
        What replays it, and the work's result, which each replay writes anew.

    Raises:
        InputError: the host reads a value on the way.
    """
    with aside(device), _NoReads():  # type: ignore[no-untyped-call]
        work()
    graph = torch.cuda.CUDAGraph()
    # By thread: others may wait for the device meanwhile, as those that read metrics.
    with torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Compute on a GPU's stream for captures while the body runs: what autograd keeps of parameters belongs to it."""
    if device.type != "cuda":
        yield
        return
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _replay(recording: _Recording, leaves: Sequence[Tensor]) -> None:
    torch._foreach_copy_(recording.inputs, list(leaves))
    recording.replay()


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]


@torch.no_grad()
def _put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for each, value in zip(tensors, values, strict=True):
        each.copy_(value)


def _agree(
    found: Sequence[Tensor | None], expected: Sequence[Tensor | None], before: Sequence[Tensor | None] | None = None
) -> bool:
    """Whether tensors changed alike; what was not there changed from 0."""
    shares = []
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is None or other is None:
            shares.append(float((one is None) != (other is None)))
            continue
        start = torch.zeros_like(other) if before is None else before[at]
        assert start is not None
        ours, theirs, from_here = (each.detach().double().nan_to_num() for each in (one, other, start))
        error, change = float((ours - theirs).norm()), float((theirs - from_here).norm())
        shares.append(0.0 if error == 0 else min(error / change, 1.0) if change > 0 else 1.0)
    return sum(shares) <= _AGREES * len(shares)


def _uses_number(*_: object) -> NoReturn:
    raise InputError("the risk uses the step's number, which a graph would keep")


_USES = [
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
    *(
        "floordiv",
        "mod",
        "rmod",
        "pow",
        "rpow",
        "neg",
        "bool",
        "int",
        "float",
        "index",
        "hash",
        "str",
        "repr",
        "format",
    ),
]

NO_NUMBER: Any = type("NoNumber", (), dict.fromkeys([f"__{name}__" for name in _USES], _uses_number))()
"""Stands for the step's number in a recording: its use raises InputError."""


class _NoReads(TorchDispatchMode):
    """Refuses operations whose result the host waits for (InputError)."""

    _READS = frozenset(
        ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim")
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        by_mask = name in ("index", "index_put", "index_put_") and any(each.dtype == torch.bool for each in given)
        if (name in self._READS or by_mask) and any(each.is_cuda for each in given):
            raise InputError(f"the host reads a value on the way ({name})")
        result = func(*args, **(kwargs or {}))
        copies = name in ("_to_copy", "copy_") and any(each.is_cuda for each in given)
        if copies and isinstance(result, Tensor) and not result.is_cuda:
            raise InputError("the host reads a value on the way (a copy to the CPU)")
        return result
