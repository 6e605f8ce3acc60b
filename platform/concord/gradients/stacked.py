"""Several environments in one process: one vectorized backward pass computes and sums their gradients."""

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from concord.aggregation import Rule
from concord.aggregation.families import masks
from concord.errors import ArgumentError, InputError, first_line
from concord.gradients.backward_graph import gradients_of
from concord.gradients.buffer_means import BufferMeans, replace_buffers
from concord.gradients.collected import Collected
from concord.gradients.exchange import Processes, SliceExchange
from concord.gradients.group_gradients import chunks, tolerances
from concord.gradients.layout import require_no_hooks_after_accumulation, require_unchanged
from concord.gradients.nonfinite import collect_finite, random_state, set_random_state
from concord.gradients.pieces import MeanOfPieces, Pieces, joined
from concord.gradients.pooled import PooledPass
from concord.gradients.risk import Batch, Calls, Loss, MeanRisk, Risk, as_risk, check_weights, take
from concord.gradients.rows import Rows
from concord.gradients.step import Aggregation, AggregationOptions, EnvironmentStep
from concord.gradients.step_graph import NO_NUMBER, Recordable, StepGraph
from concord.gradients.sums import Sums
from concord.machine import last_level_cache

_LARGEST_CHUNK = 1 << 30  # bytes of gradients
_FEWEST_TOGETHER = 8  # fewer are slower also where the cache holds no more: their matrix products are too small

Vectorize = bool | Literal["pooled"]
"""How environments are computed, see :class:`StackedGradients`."""

_Sum = tuple[Tensor, Tensor, Mapping[str, Tensor]]  # risks, weights, new buffers


class StackedGradients(Recordable):
    """Aggregate the gradients of this process's environments, and store the result in ``parameter.grad``.

    One call replaces ``loss.backward()``::

        gradients = StackedGradients(model, torch.nn.functional.cross_entropy, AndMask(threshold=0.8))
        for inputs, targets in batches:  # (environments, batch, ...), (environments, batch)
            step = gradients((inputs, targets))
            optimizer.step()

    For batches of any other form pass a risk in place of the loss, see :mod:`concord.gradients.risk`.

    The environments go through the model as one batch, or their gradients are computed by ``vmap(grad)``, in chunks of
    about the same size that hold at most ``memory_limit`` bytes of gradients; the statistics of each chunk are added to
    the sums at once. A rule that compares environments needs all gradients: they are kept while they fit
    ``memory_limit`` (1 GiB if None); otherwise they are formed layer by layer, if the environments go through the model
    as one batch.

    Dropout draws its own mask for each environment, from the process's default generator. Batch norm normalizes each
    environment's batch separately, and the running statistics become the mean over the environments' own updates, as
    with one process for each environment. If vmap does not support the model (control flow that depends on values,
    ``.item()``, operators without a batching rule), environments are computed one after the other, with the same
    result, and a warning says so.

    Args:
        model: the model; ``grad`` of its parameters that require gradients is replaced, not added to.
        loss: the loss or the risk.
        rule: the rule.
        names: the environments' names, for errors; ``environment 0…`` if None.
        group: the two-level form: other processes of this group hold other environments, and the rule is applied
            to all of them together. Every process must then begin with the same weights, which nothing sends, and call
            equally often. Give ``names``, since their number is that of this process's environments. None: this process
            has all environments.
        memory_limit: bytes of per-environment gradients that may exist at once. None chooses by the device: on a
            CPU the size of its last cache, but at least 8 environments; at most 1 GiB; on a GPU 1 GiB. The size of the
            chunks decides the rounding of sums and dropout's draws, so give a number if runs on different machines must
            agree in these.
        vectorize: True computes the environments by vmap, False one after the other. ``pooled`` sends them through the
            model as one batch, see :mod:`~concord.gradients.pooled`; it needs a loss, and a model of known layers that
            treats examples separately. None chooses, see :meth:`choose`.
        accumulate: process each environment's batch in this number of pieces, see :mod:`~concord.gradients.pieces`; the
            loss or risk must be a mean over examples, or a sum and its weight.
        graph: replay the step as a CUDA graph after the first ones, see :mod:`~concord.gradients.step_graph`; a step
            that cannot be captured is computed the ordinary way, and a line says why.
        options: see :class:`~concord.gradients.step.Aggregation`.

    Attributes:
        vectorize: as given, or as chosen.

    Raises:
        InputError: the model has no parameter that requires a gradient, ``group`` came without ``names``, the rule's
            statistics lack a property that they claim, or ``pooled`` came with ``environment_momentum`` or
            ``accumulate``. Later: the environments' gradients do not fit ``memory_limit``, and the rule needs them all;
            or the model normalizes over the batch, which ``accumulate`` would divide.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Risk,
        rule: Rule,
        *,
        names: Sequence[str] | None = None,
        group: dist.ProcessGroup | None = None,
        memory_limit: int | None = None,
        vectorize: Vectorize | None = None,
        accumulate: int = 1,
        graph: bool = False,
        **options: Unpack[AggregationOptions],
    ) -> None:
        if not (vectorize is None or isinstance(vectorize, bool) or vectorize == "pooled"):
            raise ArgumentError("vectorize", vectorize, "must be True, False, 'pooled' or None")
        self.aggregation = Aggregation(rule, **options)
        limit = _LARGEST_CHUNK if memory_limit is None else memory_limit
        compares = not masks(self.aggregation.rule)
        self._sums: Collected = Rows(model, self.aggregation, limit) if compares else Sums(model, self.aggregation)
        self._momentum = self.aggregation.momentum(self._sums.parameters)
        if self._momentum is not None and names is not None and len(set(names)) < len(names):
            raise ArgumentError("names", ", ".join(names), "two environments have one name, by which momentum is kept")
        if self._momentum is not None and vectorize == "pooled":
            raise ArgumentError(
                "vectorize", vectorize, "forms no gradient of an environment, of which momentum is kept"
            )
        if accumulate > 1 and vectorize == "pooled":
            raise ArgumentError(
                "vectorize", vectorize, "forms no gradient of an environment, to which pieces are added"
            )
        if group is not None and names is None:
            raise InputError("names: needed with a process group; their number is that of this process's environments")
        self.model = model
        self.names = names
        self.vectorize = vectorize
        self._pieces = Pieces(model, accumulate)
        self._device = self._sums.device
        self._graph = StepGraph(self._device) if graph else None
        risk = as_risk(loss, counts=accumulate > 1)
        self._risk = MeanRisk(model, risk, self.aggregation.autocast, self._device)
        self._calls = Calls()
        size = self._sums.layout.components * self._sums.layout.dtype.itemsize
        self._chunk = sys.maxsize if compares else _environments_together(size, self._device, memory_limit)
        self._chosen = vectorize is False
        self._given = vectorize
        self._chosen_in: tuple[bool, ...] = ()  # of the modules, when the way was chosen
        self._pooled: PooledPass | None = None
        self._finite_flags: list[Tensor] | None = None
        self._left: Tensor | None = None  # the environments that a sum is of; None: all
        self._tries = False  # whether what is computed is only compared
        self._given_leaves: list[tuple[Tensor, int]] = []  # of a step's batch, with their counts of changes in place
        self._exchange: SliceExchange | None = None
        if group is not None:
            self._exchange = self._sums.exchange(Processes.of(names or (), group))

    def __call__(self, batch: Batch, *more: Any, step: int | None = None) -> EnvironmentStep:
        """Fill ``parameter.grad`` with the aggregated gradient of these batches.

        Args:
            batch: a tree of tensors ``(environments, batch, ...)``.
            step: the step's number, for the risk, errors, and rules that draw; counted from 0 if None.
            more: ``gradients(inputs, targets, step)`` is short for ``gradients((inputs, targets), step)``.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``.
            InputError: the batch's leaves do not fit each other, the names, or earlier batches; the risk is no scalar
                or has no positive weight; a parameter was frozen, unfrozen or exchanged since this was made, or has a
                hook that cannot run.
        """
        batch, _, at = self._calls.take(batch, more, step, self.names)
        require_unchanged(self.model, self._sums.parameters)
        require_no_hooks_after_accumulation(self._sums.parameters)
        with torch.enable_grad():  # also where the caller has disabled it
            return self.ordinary(batch, at) if self._graph is None else self._graph(self, batch, at)

    def ordinary(self, batch: Batch, at: int) -> EnvironmentStep:
        """The step of number ``at``, not by a graph."""
        environments = len(pytree.tree_leaves(batch)[0])
        # In another mode a layer may mix examples, as normalization over the batch does in training.
        pooled = self._given is None and self.vectorize == "pooled" and environments > 1
        if not self._chosen or (pooled and self._chosen_in != self._training_modes):
            self.choose(batch, at)
        names = self.names or [f"environment {index}" for index in range(environments)]
        if self._momentum is not None:
            self._momentum.begin(names)
        leaves = pytree.tree_leaves(batch)
        self._given_leaves = [(leaf, leaf._version) for leaf in leaves if not leaf.is_inference()]

        summed: list[_Sum] = []

        def collect(left: Tensor | None) -> None:
            self._left = left
            if left is not None:
                self._require_unwritten()
            part, count = (batch, environments) if left is None else (take(batch, left), len(left))
            summed.append(self._sum(part, count, at))

        def find(left: Tensor | None) -> Tensor:
            if isinstance(self._sums, Rows):
                return self._sums.finite()
            self._finite_flags = []
            collect(left)
            found, self._finite_flags = torch.cat(self._finite_flags).cpu(), None
            return found

        finite = collect_finite(
            environments, self.aggregation.policy, self._device, collect, self._sums.are_finite, find
        )
        self._given_leaves = []
        risks, weights, _ = summed[0]
        if self._risk.weighted:
            check_weights(weights)
        applied = self._sums.apply_rule(finite, names, at, self._exchange)
        if finite is None or bool(finite.any()):
            replace_buffers(self.model, summed[-1][2])
        self.aggregation.scale_gradients(self._sums.parameters.values())
        return applied._replace(losses=risks, weights=weights)

    def obstacle(self) -> str | None:
        """Why the step cannot be recorded, if that is known after a step."""
        if self._exchange is not None:
            return "the environments belong to several processes"
        if self._risk.weighted:
            return "the host reads the weights of the risks"
        if (reason := self._hooked()) is not None:
            return reason
        return super().obstacle()

    def recorded(self, batch: Batch) -> EnvironmentStep:
        """The step in the chosen way, which no other one replaces, and without a look at its values."""
        environments = len(pytree.tree_leaves(batch)[0])
        names = self.names or [f"environment {index}" for index in range(environments)]
        with self.aggregation.recording():
            if self.vectorize is False or environments == 1:
                found = self._sum_one_by_one(batch, environments, NO_NUMBER)
            elif self.vectorize == "pooled":
                found = self._sum_pooled(batch, environments, NO_NUMBER)
            else:
                found = self._sum_vectorized(batch, environments, NO_NUMBER)
            applied = self._sums.apply_rule(None, names, NO_NUMBER)
            replace_buffers(self.model, found[2])
        return applied._replace(losses=found[0], weights=found[1])

    @property
    def _training_modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple(module.training for module in self.model.modules())

    def state_dict(self) -> dict[str, Tensor]:
        """The state for a checkpoint: the averages of these environments' gradients by name, if any."""
        return {} if self._momentum is None else self._momentum.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a checkpoint's state of these environments, which have ``names``; others in it are not read.

        Raises:
            InputError: one of these environments is not in it, or with another model.
        """
        if self._momentum is not None:
            self._momentum.load_state_dict(state, self.names)

    def choose(self, batch: Batch, step: int = 0) -> None:
        """Choose how to compute environments: pooled if the result is the same, else by vmap, else one by one.

        The first step chooses with its own batch, unless this was called before. The model's present weights and the
        batch decide, never a measured time; so a resumed run chooses the same from its first weights and its first
        batch.

        Args:
            batch: a batch as of a step; ``parameter.grad`` does not change.
            step: the step's number.
        """
        batch, (environments, _) = self._calls.check(batch, self.names)
        if environments == 1:
            return
        self.vectorize = self._given
        if isinstance(self._sums, Rows) and environments > self._sums.compared:  # by some of them
            environments = self._sums.compared
            batch = take(batch, slice(environments))
        momentum, self._momentum = self._momentum, None  # nothing of this enters the averages
        self._tries = True
        random = random_state(self._device)
        try:
            self.vectorize, reason = self._best(
                batch, environments, step, pooled=momentum is None and self._pieces.count == 1
            )
        finally:
            self._momentum, self._tries = momentum, False
            set_random_state(self._device, random)
        self._chosen, self._chosen_in = True, self._training_modes
        if reason is not None:
            _warn(reason, stacklevel=5)

    def _best(self, batch: Batch, environments: int, step: int, *, pooled: bool) -> tuple[Vectorize, str | None]:
        """The way to compute environments, and the reason for one by one."""
        if (reason := self._hooked()) is not None:
            return False, reason
        if self.vectorize == "pooled":  # the caller's choice, which is not verified
            with contextlib.suppress(InputError):
                self._sum_pooled(batch, environments, step)
                return "pooled", None
        expected, reason = self._sum_separately(batch, environments, step)
        if not any(bool(part.any()) for parts in self._sums.values().values() for part in parts):
            self._require_graph(batch, step)
        if pooled and self.vectorize is None and self._pooled_gives(expected, batch, environments, step):
            return "pooled", None
        return reason is None, reason

    def _require_graph(self, batch: Batch, step: int) -> None:
        """Refuse a risk without a graph, such as one of detached outputs (InputError): by vmap its gradients are 0."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        risk, _ = self._risk(self._pieces.of(self._taken(batch, 0))[0], step)
        for name, buffer in before.items():
            self.model.get_buffer(name).copy_(buffer)
        if not risk.requires_grad:
            raise InputError("risk: does not depend on the model's parameters (no_grad, detach), so nothing is trained")

    def _sum(self, batch: Batch, environments: int, step: int) -> _Sum:
        """Put the summed statistics into ``self._sums``; return risks, weights, and the new buffers of the model.

        If the chosen way cannot compute a later step, the next way computes this step only: so a step's result does not
        depend on earlier steps, some of which a resumed run does not take.
        """
        if self.vectorize is False or environments == 1:
            return self._sum_one_by_one(batch, environments, step)
        if self.vectorize == "pooled" and self._finite_flags is None:
            random = random_state(self._device)
            try:
                return self._sum_pooled(batch, environments, step)
            except InputError:  # a mistake of the user's is raised again by the other ways
                set_random_state(self._device, random)
                self._require_unwritten()
        result, reason = self._sum_separately(batch, environments, step)
        if reason is not None and self._finite_flags is None:
            _warn(reason, stacklevel=7)
        return result

    def _sum_separately(self, batch: Batch, environments: int, step: int) -> tuple[_Sum, str | None]:
        """The sum by vmap; else by one backward pass for each environment, with the reason."""
        if isinstance(self._sums, Rows):
            self._sums.require_room(environments)
        random = random_state(self._device)
        result = self._try_vectorized(batch, environments, step)
        if not isinstance(result, str):
            return result, None
        set_random_state(self._device, random)
        self._require_unwritten()
        if self._momentum is not None:
            self._momentum.take_again()
        return self._sum_one_by_one(batch, environments, step), result

    def _try_vectorized(self, batch: Batch, environments: int, step: int) -> _Sum | str:
        """The sum by vmap, or the reason why vmap is not possible."""
        if (reason := self._hooked()) is not None:
            return reason
        try:
            return self._sum_vectorized(batch, environments, step)
        except Exception as error:  # vmap cannot take the model
            problem = first_line(error)
            if _is_out_of_memory(error):
                together = min(self._chunk, environments)
                return f"memory does not suffice for {together} at once (give a smaller memory_limit): {problem}"
            return f"vmap cannot take this model or risk: {problem}"

    def _hooked(self) -> str | None:
        """The reason why environments cannot be computed together, if a parameter has a hook."""
        hooked = next((name for name, each in self._sums.parameters.items() if each._backward_hooks), None)
        return f"the gradient hook of parameter {hooked} has to see each of them" if hooked is not None else None

    def _pooled_gives(self, expected: _Sum, batch: Batch, environments: int, step: int) -> bool:
        """Whether one pass for all gives the sums just formed, and those of near weights if a gradient is 0 at these.

        It does not if examples interact, or if a parameter is also used outside of its module. After a layer that
        begins at 0 no gradient shows that.
        """
        zeros = any(not bool(part.any()) for part in next(iter(self._sums.values().values())))
        if not self._pooled_agrees(expected, batch, environments, step):
            return False
        if not zeros:
            return True
        with _moved_a_little(self._sums.parameters.values()):
            expected, reason = self._sum_separately(batch, environments, step)
            return reason is None and self._pooled_agrees(expected, batch, environments, step)

    def _pooled_agrees(self, expected: _Sum, batch: Batch, environments: int, step: int) -> bool:
        """Whether one pass for all gives the sums just formed."""
        sums = self._sums.values()
        old = dict(self.model.named_buffers())
        changed = {name: new for name, new in expected[2].items() if not torch.equal(new, old[name])}
        half = self.aggregation.autocast is not None
        near = functools.partial(torch.allclose, rtol=0.02 if half else 1e-4, atol=1e-5)
        try:
            if not changed.keys() <= self._pooled_pass().norms.names:
                return False
            risks, _, new_buffers = self._sum_pooled(batch, environments, step)
        except Exception:  # of any kind: the other ways are there
            return False
        close = near(risks, expected[0])
        close = close and all(near(new_buffers.get(name, old[name]), new) for name, new in changed.items())
        relative, absolute = tolerances(half)  # of signs, too, which differ where gradients are rounding
        for name, parts in self._sums.values().items():
            errors = [
                float((found - total).nan_to_num_().norm()) for found, total in zip(parts, sums[name], strict=True)
            ]
            norms = [float(total.nan_to_num(neginf=0, posinf=0).norm()) for total in sums[name]]
            least = absolute * math.hypot(*norms)
            close = close and all(
                error <= max(relative * norm, least) for error, norm in zip(errors, norms, strict=True)
            )
        return close

    def _sum_vectorized(self, batch: Batch, environments: int, step: int) -> _Sum:
        parameters = tuple(parameter.detach() for parameter in self._sums.parameters.values())
        scale = self.aggregation.scale(self._device)
        names = self._sums.layout.names

        def objective(parameters: tuple[Tensor, ...], buffers: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Any]:
            # The parameters come as a tuple: functorch flattens its arguments at every level, and dictionaries cost
            # it 2 % of a small network's step.
            state = {f"model.{name}": value for name, value in zip(names, parameters, strict=True)}
            state |= {f"model.{name}": value for name, value in buffers.items()}
            risk, weight = functional_call(self._risk, state, (batch, step))
            # A forward pass may write into a buffer or assign it anew; functional_call puts that into state.
            after = {name: state[f"model.{name}"].detach() for name in buffers}
            return risk if scale is None else risk * scale, (risk.detach(), weight, after)

        vectorized = vmap(grad(objective, has_aux=True), (None, 0, 0), randomness="different")
        risks, weights = [], []
        buffer_means = BufferMeans(self.model)
        for part in self._chunks(environments):
            buffers = self._copies_of_buffers(part.stop - part.start)
            first, *others = self._pieces.of(self._taken(batch, part), dim=1)
            gradients, (risk, weight, buffers) = vectorized(parameters, buffers, first)
            mean = MeanOfPieces(gradients, risk, weight)
            for piece in others:
                gradients, (risk, weight, buffers) = vectorized(parameters, buffers, piece)
                mean.add(gradients, risk, weight)
            risks.append(mean.risk)
            weights.append(mean.weight)
            self._add(mean.gradients, scale, part.start)
            buffer_means.add(buffers)
        return joined(risks), joined(weights), buffer_means.over(environments)

    def _chunks(self, environments: int) -> Iterator[slice]:
        """The environments in chunks of about equal size."""
        return chunks(environments, math.ceil(environments / math.ceil(environments / self._chunk)))

    def _sum_pooled(self, batch: Batch, environments: int, step: int) -> _Sum:
        if (reason := self._hooked()) is not None:
            raise InputError(reason)
        pooled, scale = self._pooled_pass(), self.aggregation.scale(self._device)
        self._sums.zero()
        pooled.norms.begin()
        parts = self._chunks(environments)
        added = [pooled.add(self._taken(batch, part), part.stop - part.start, step, scale) for part in parts]
        risks, weights = zip(*added, strict=True)
        return joined(risks), joined(weights), pooled.norms.buffers(self.model, environments)

    def _pooled_pass(self) -> PooledPass:
        if self._pooled is None:
            self._pooled = PooledPass(self._risk, self._sums)
        return self._pooled

    def _sum_one_by_one(self, batch: Batch, environments: int, step: int) -> _Sum:
        scale = self.aggregation.scale(self._device)
        risks, weights = [], []
        before = self._copies_of_buffers(1)
        buffer_means = BufferMeans(self.model)

        def of_piece(piece: Batch) -> tuple[list[Tensor], Tensor, Tensor]:
            risk, weight = self._risk(piece, step)
            scaled = risk if scale is None else risk * scale
            gradients = gradients_of(scaled, self._sums.parameters)
            return [gradient[None] for gradient in gradients], risk.detach()[None], weight[None]

        for environment in range(environments):
            first, *others = self._pieces.of(self._taken(batch, environment))
            mean = MeanOfPieces(*of_piece(first))
            for piece in others:
                mean.add(*of_piece(piece))
            risks.append(mean.risk)
            weights.append(mean.weight)
            self._add(mean.gradients, scale, environment)
            state = dict(self.model.named_buffers())
            after = {name: state[name].detach().clone()[None] for name in before}
            for name, value in before.items():
                state[name].copy_(value[0])
            buffer_means.add(after)
        return torch.cat(risks), torch.cat(weights), buffer_means.over(environments)

    def _taken(self, batch: Batch, environments: Any) -> Batch:
        """The batch of some environments, or of one; a copy if more passes need it, as a model may write to it."""
        part = take(batch, environments)
        return pytree.tree_map(torch.clone, part) if self._tries else part

    def _require_unwritten(self) -> None:
        """Refuse to compute a step again whose batch the model has written to (InputError)."""
        if not self._tries and any(leaf._version != version for leaf, version in self._given_leaves):
            raise InputError(
                "batch: the model writes to its input in place, and this step has to be computed a second time; write "
                "to a copy, for example inputs = inputs - mean in place of inputs -= mean"
            )

    def _add(self, gradients: Sequence[Tensor], scale: Tensor | None, start: int) -> None:
        """Add the gradients of the summed environments from ``start`` on, or replace the sums by them."""
        if scale is not None:
            gradients = [gradient / scale for gradient in gradients]
        if self._finite_flags is not None:
            flags = [torch.isfinite(gradient).reshape(len(gradient), -1).all(1) for gradient in gradients]
            self._finite_flags.append(torch.stack(flags).all(0))
        part = slice(start, start + len(gradients[0]))
        rows = part if self._left is None else self._left[part]
        for index, gradient in enumerate(gradients):
            seen = gradient if self._momentum is None else self._momentum.averaged(index, rows, gradient)
            self._sums.add(index, seen, accumulate=start > 0)

    def _copies_of_buffers(self, environments: int) -> dict[str, Tensor]:
        if not any(module.training for module in self.model.modules()):
            return {}
        return {
            name: buffer.detach().expand(environments, *buffer.shape).clone()
            for name, buffer in self.model.named_buffers()
        }


def _environments_together(size: int, device: torch.device, memory_limit: int | None) -> int:
    """The number of environments to vectorize at once, from the bytes of one environment's gradients."""
    if memory_limit is None:
        largest = _LARGEST_CHUNK // size
        cached = largest if device.type != "cpu" else last_level_cache() // size
        return max(1, min(largest, max(cached, _FEWEST_TOGETHER)))
    return max(1, memory_limit // size)


@contextlib.contextmanager
def _moved_a_little(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Move the weights a little, none of them remaining 0, while the body runs."""
    generator = torch.Generator().manual_seed(0)
    before = [(parameter, parameter.detach().clone()) for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter, values in before:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * (0.01 + 0.1 * values.square().mean().sqrt()))
        yield
    finally:
        with torch.no_grad():
            for parameter, values in before:
                parameter.copy_(values)


def _warn(reason: str, stacklevel: int) -> None:
    warnings.warn(f"environments are computed one by one, since {reason}", stacklevel=stacklevel)


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU PyTorch says so in a RuntimeError like any other.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
