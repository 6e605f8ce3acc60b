"""One environment a process: an aggregator as a communication hook of ``DistributedDataParallel``.

Each process computes the gradient of its own environment's loss. DDP passes the gradients to the hook bucket by bucket
while backward runs, and receives the aggregated gradients. On a DDP model of your own::

    hook = register_aggregation_hook(ddp_model, AndMask(threshold=0.8))

The hook is an ordinary one: ``ddp_model.register_comm_hook(AggregationHook(...), aggregation_hook)`` does the same, and
a wrapper such as PyTorch's ``fp16_compress_wrapper`` can be put around :func:`aggregation_hook`. The exchange of
gradients is described in :mod:`concord.gradients.exchange`.
"""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import Rule, Weighting
from concord.aggregation.families import masks
from concord.aggregation.weighting import name_of
from concord.errors import InputError
from concord.gradients.environment_momentum import EnvironmentMomentum
from concord.gradients.exchange import Processes, SliceExchange, complete, weights_of_slices
from concord.gradients.layout import Layers, Layout, require_unchanged, trainable
from concord.gradients.nonfinite import presence
from concord.gradients.pieces import Pieces
from concord.gradients.risk import Batch, Calls, Loss, MeanRisk, Risk, as_risk, check_weights, take
from concord.gradients.step import Aggregation, AggregationOptions, EnvironmentStep

# DDP's option by which a forward pass leaves buffers alone; PyTorch 2.13 gave it another name.
_FORWARD_SYNC = inspect.signature(DistributedDataParallel).parameters.keys() & {"forward_sync_buffers"}
_OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _FORWARD_SYNC else "broadcast_buffers": False}


@dataclass
class _Bucket:
    exchange: SliceExchange
    buffer: Tensor
    present: Tensor
    parameters: list[Tensor]
    future: Future[Tensor]


class AggregationHook:
    """The state of :func:`aggregation_hook`: register one on one model.

    Each process's gradient is one environment's gradient, with gradients accumulated under ``no_sync()``. The result
    replaces DDP's average.

    Args:
        rule: the rule. With a weighting all buckets must be there before any can be aggregated; half of the messages
            still overlap with backward.
        environment: this process's name in errors; ``rank N`` if None.
        group: the process group of the DDP model; None is the default group.
        parameters: the model's trainable parameters by name, in its order; needed by rules that draw at random and by
            ``environment_momentum``, to number the components.
        options: see :class:`~concord.gradients.step.Aggregation`. ``raise`` ends backward in every process with an
            error that names the process's environment and the step (to continue, wrap the model in DDP again, as after
            any error in a hook). With ``skip`` all buckets must be there before any can be aggregated, so nothing
            overlaps with backward. ``scaler`` is the scaler that scaled the loss.

    Attributes:
        step: the number of backward passes that were aggregated. A rule draws at random by it: set it after a restart.
        skipped: the names of the environments left out of the last backward pass.
        skipped_total: the number of times that an environment was left out.
        weights: the weights of all processes' environments in the last backward pass, ``(environments,)`` float64, 0
            for an environment that was left out; None if the rule is no weighting.

    Raises:
        InputError: the rule's statistics lack a property that they claim, or ``parameters`` are needed and missing.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        environment: str | None = None,
        group: dist.ProcessGroup | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        **options: Unpack[AggregationOptions],
    ) -> None:
        self.aggregation = Aggregation(rule, **options)
        draws, beta = len(getattr(rule, "draws", ())) > 0, self.aggregation.environment_momentum
        if parameters is None and (draws or beta > 0):
            drawn = f"rule {type(rule).__name__}: draws at random for each component"
            reason = drawn if draws else f"environment_momentum={beta}: is kept by parameter"
            raise InputError(f"{reason}; register it with register_aggregation_hook, or give the model's parameters")
        self.processes = Processes.of([environment or f"rank {dist.get_rank(group)}"], group)
        parameters = parameters or {}
        ids = [id(parameter) for parameter in parameters.values()]
        self._numbers = dict(zip(ids, Layout.of(parameters).offsets, strict=False))
        self._indices = {each: index for index, each in enumerate(ids)}
        self._momentum = self.aggregation.momentum(parameters)
        self.step = 0
        self.skipped: tuple[str, ...] = ()
        self.skipped_total = 0
        self.weights: Tensor | None = None
        self._kept: dict[int, Tensor] = {}
        self._exchanges: dict[tuple[int, torch.dtype, tuple[int, ...]], SliceExchange] = {}
        self._averages: dict[int, Tensor] = {}  # of each parameter; aggregated in place
        self._waiting: list[_Bucket] = []
        self._sent: list[_Bucket] = []
        self._scale: Tensor | None = None

    def kept_fraction(self, parameter: Tensor) -> Tensor:
        """The part of this parameter's components that the last backward pass kept, a float32 number in [0, 1].

        Raises:
            KeyError: the parameter was in no aggregated bucket.
            InputError: the rule lets whole gradients through.
        """
        if not masks(self.aggregation.rule):
            raise InputError(f"rule {name_of(self.aggregation.rule)}: drops no components; there is no kept fraction")
        return self._kept[id(parameter)]

    def aggregated(self, parameter: Tensor) -> Tensor:
        """The aggregate for a parameter that no environment used in the last backward pass: that of the environments'
        averages; 0 without ``environment_momentum``.
        """
        average = self._averages.get(id(parameter))
        return torch.zeros_like(parameter) if average is None else average.clone()

    def aggregate(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Aggregate a bucket; its future is done after the last bucket of this backward pass has arrived.

        Raises:
            InputError: no backward pass runs: ``Join()`` lets this process take part as an environment of gradient 0.
        """
        if torch._C._current_graph_task_id() == -1:
            _refuse_to_join()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            shapes = ", ".join(str(tuple(each.shape)) for each in bucket.parameters())
            raise InputError(f"parameter of shape {shapes}: has a sparse gradient; give its embedding sparse=False")
        present = presence(buffer)
        if self._momentum is not None:
            self._average(bucket, present, self._momentum)
        parameters = list(bucket.parameters())
        layers = Layers(
            tuple(parameter.numel() for parameter in parameters),
            tuple(self._numbers.get(id(parameter), 0) for parameter in parameters),
        )
        key = (bucket.index(), buffer.dtype, (*layers.sizes, *layers.numbers))
        if key not in self._exchanges:
            if bucket.index() == 0:  # DDP lays its buckets out anew after the first pass
                self._exchanges.clear()
            self._exchanges[key] = SliceExchange(
                self.aggregation, layers, buffer.dtype, buffer.device, self.processes, sends_statistics=False
            )
        future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        self._waiting.append(_Bucket(self._exchanges[key], buffer, present, parameters, future))
        if not self._waits:
            self._send(present)
        elif bucket.is_last():
            present = torch.stack([waiting.present for waiting in self._waiting]).amin(0)
            self._send(present, self.processes.gathered(present))
        if bucket.is_last():
            self._receive()
        return future

    def state_dict(self) -> dict[str, Tensor]:
        """The state for a checkpoint: the average of this environment's gradients by its name, if there is one."""
        return {} if self._momentum is None else self._momentum.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a checkpoint's state of this environment; others in it are not read.

        Raises:
            InputError: this environment is not in it, or with another model.
        """
        if self._momentum is not None:
            self._momentum.load_state_dict(state, self.processes.names[self.processes.rank])

    @property
    def _waits(self) -> bool:
        """Whether all buckets wait until it is known which environments are finite."""
        return self.aggregation.policy == "skip" and not isinstance(self.aggregation.rule, Weighting)

    def _average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        present: Tensor,
        momentum: EnvironmentMomentum,
    ) -> None:
        """Replace the gradients by the averages."""
        if bucket.index() == 0:
            momentum.begin(self.processes.names[self.processes.rank])
        # The flag of a GPU is not read, since the host would wait: each parameter's gradient is checked again.
        finite = present > 0 if not present.is_cuda and bool(present > 0) else None
        scale = self.aggregation.scale(present.device)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            given = gradient if scale is None else gradient / scale
            average = momentum.averaged(self._indices[id(parameter)], slice(None), given[None], finite)[0]
            gradient.copy_(average if scale is None else average * scale)
            self._averages[id(parameter)] = gradient

    def _send(self, present: Tensor, everyones: Tensor | None = None) -> None:
        # A bucket's second phase starts when the next bucket is there: its first phase had that long to travel
        # beside backward, and every process starts its messages in the same order.
        for bucket in self._waiting:
            bucket.exchange.send({"gradient": bucket.buffer}, present)
            if self._sent:
                self._apply_rule(self._sent[-1], everyones)
            self._sent.append(bucket)
        self._waiting = []
        if everyones is not None:
            self._apply_rule(self._sent[-1], everyones)

    def _apply_rule(self, bucket: _Bucket, everyones: Tensor | None = None) -> None:
        if isinstance(self.aggregation.rule, Weighting):  # which has weights when all are there
            bucket.exchange.form_gram()
            return
        scale = self.aggregation.scale(bucket.buffer.device)
        bucket.exchange.apply_rule(bucket.buffer, self.step, everyones, scale)

    def _receive(self) -> None:
        sent, self._sent = self._sent, []
        if not self._waits:
            self._apply_rule(sent[-1])
        step, self.step = self.step, self.step + 1
        if isinstance(self.aggregation.rule, Weighting):
            scale = self.aggregation.scale(sent[0].buffer.device)
            self.weights = weights_of_slices([bucket.exchange for bucket in sent], step, scale)
            for bucket in sent:
                bucket.exchange.apply_rule(bucket.buffer, step, weights=self.weights)
        kept, self.skipped = complete([bucket.exchange for bucket in sent], step)
        self.skipped_total += len(self.skipped)
        for bucket, fractions in zip(sent, kept, strict=True):
            for parameter, fraction in zip(bucket.parameters, fractions, strict=True):
                self._kept[id(parameter)] = fraction
            bucket.future.set_result(bucket.buffer)


def aggregation_hook(state: AggregationHook, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """The communication hook itself, for ``register_comm_hook(state, aggregation_hook)``."""
    return state.aggregate(bucket)


def register_aggregation_hook(
    model: DistributedDataParallel,
    rule: Rule,
    *,
    environment: str | None = None,
    **options: Unpack[AggregationOptions],
) -> AggregationHook:
    """Aggregate the gradients of a DDP model with ``rule``, every process being one environment.

    Call it in every process, before the first backward pass. The arguments are those of :class:`AggregationHook`.

    Later a forward pass for training raises InputError if a parameter was frozen, unfrozen or exchanged, which DDP does
    not notice. ``model.join()`` also raises InputError: a process without batches would be an environment with a
    gradient of zero.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InputError(f"model: {type(model).__name__}, expected a model in DistributedDataParallel")
    return _register(model, model.module, rule, environment, **options)


def _register(
    wrapped: DistributedDataParallel,
    model: nn.Module,
    rule: Rule,
    environment: str | None,
    **options: Unpack[AggregationOptions],
) -> AggregationHook:
    """Register the hook on ``wrapped``, whose parameters are those of ``model`` and have their names there."""
    parameters = trainable(model)
    hook = AggregationHook(rule, environment=environment, group=wrapped.process_group, parameters=parameters, **options)
    wrapped.register_comm_hook(hook, aggregation_hook)
    wrapped.register_forward_pre_hook(functools.partial(_check_parameters, model, parameters))
    wrapped.join_hook = _refuse_to_join  # type: ignore[method-assign]  # Join() asks each of its models for it
    return hook


def _check_parameters(model: nn.Module, known: dict[str, nn.Parameter], *_: object) -> None:
    if torch.is_grad_enabled():
        require_unchanged(model, known)


def _refuse_to_join(**_: Any) -> NoReturn:
    raise InputError(
        "model.join(): uneven numbers of batches cannot be aggregated, since a rule needs every environment at every "
        "step; give all processes the same number"
    )


class HookedGradients:
    """A gradient source for one environment a process: a plain backward pass through a DDP model with the hook.

    Dropout and batch norm work as usual in each process. Batch norm's running statistics are those of this process's
    environment and are not synchronized; average them before an evaluation.

    Args:
        model: the model; its ``grad`` fields are filled. DDP wraps model and risk together, so the risk receives the
            model itself and may call its parts.
        loss: the loss or the risk, see :mod:`concord.gradients.risk`.
        rule, environment, options: as for :class:`AggregationHook`.
        find_unused_parameters: DDP's option for a loss that does not depend on all parameters.
        accumulate: process the batch in this number of pieces, see :mod:`~concord.gradients.pieces`; the loss or risk
            must be a mean over examples, or a sum and its weight.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Risk,
        rule: Rule,
        *,
        environment: str | None = None,
        find_unused_parameters: bool = False,
        accumulate: int = 1,
        **options: Unpack[AggregationOptions],
    ) -> None:
        self._parameters = list(trainable(model).values())
        if not self._parameters:
            raise InputError("model: none of its parameters requires a gradient")
        device = self._parameters[0].device
        self._risk = DistributedDataParallel(
            MeanRisk(model, as_risk(loss, counts=accumulate > 1), options.get("autocast"), device),
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=find_unused_parameters,
            **_OWN_BUFFERS,
        )
        self.hook = _register(self._risk, model, rule, environment, **options)
        self._pieces = Pieces(model, accumulate)
        self._calls = Calls()

    def __call__(self, batch: Batch, *more: Any, step: int | None = None) -> EnvironmentStep:
        """One step; leaves of the batch begin with ``(1, examples)``; see :class:`EnvironmentStep`."""
        names = self.hook.processes.names[self.hook.processes.rank]
        batch, _, self.hook.step = self._calls.take(batch, more, step, names)
        for parameter in self._parameters:
            parameter.grad = None
        scale, before = self.hook.aggregation.scale(self._parameters[0].device), self.hook.step
        *others, last = self._pieces.of(take(batch, 0))
        with self._risk.no_sync():
            sums = [self._add_sum(piece, scale) for piece in others]
        risk, weight = self._risk(last, self.hook.step)
        share = weight
        if sums:
            weight = torch.stack([of_piece for _, of_piece in sums]).sum() + weight
        if self._risk.module.weighted:
            check_weights(weight)
        mean = risk.detach()
        if sums:
            risk = risk * (share / weight)
            mean = torch.stack([total for total, _ in sums]).sum() / weight + risk.detach()
            torch._foreach_div_([each.grad for each in self._parameters if each.grad is not None], weight)
        (risk if scale is None else risk * scale).backward()
        if self.hook.step == before:
            raise InputError(
                f"step {before}: the risk left out parameters in environment {names[0]}; give "
                "find_unused_parameters=True, or two environments or more to each process"
            )
        for parameter in self._parameters:
            if parameter.grad is None:  # used in no environment, so DDP has thrown its aggregate away
                parameter.grad = self.hook.aggregated(parameter)
        kept = torch.empty(0, device=weight.device)
        if masks(self.hook.aggregation.rule):
            kept = torch.stack([self.hook.kept_fraction(parameter) for parameter in self._parameters])
        skipped, environments = self.hook.skipped, self.hook.processes.total - len(self.hook.skipped)
        return EnvironmentStep(mean[None], kept, skipped, weight[None], environments, self.hook.weights)

    def _add_sum(self, piece: Batch, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the gradient of a piece's sum of risks in this process; return the sum and its weight."""
        risk, weight = self._risk(piece, self.hook.step)
        total = risk * weight
        (total if scale is None else total * scale).backward()
        return total.detach(), weight
