"""One environment a process: an aggregator as a communication hook of ``DistributedDataParallel``.

Each process computes the gradient of its own environment's loss; DDP hands the gradients over bucket by bucket while
backward is still running, and gets the aggregated ones back. On a DDP model of one's own::

    hook = register_aggregation_hook(ddp_model, AndMask(threshold=0.8))

The hook is ordinary: ``ddp_model.register_comm_hook(AggregationHook(...), aggregation_hook)`` does the same, and a
wrapper such as PyTorch's ``fp16_compress_wrapper`` can be put around :func:`aggregation_hook`.
How the environments' gradients meet is said, with measurements, in :mod:`concord.gradients.exchange`.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import Aggregator
from concord.aggregation.rule import accumulation_dtype
from concord.errors import InputError
from concord.gradients.autocast import outputs_of
from concord.gradients.exchange import SliceExchange
from concord.gradients.layout import require_unchanged, trainable
from concord.gradients.nonfinite import NonFinite, NonFiniteGradientError
from concord.gradients.step import EnvironmentStep
from concord.gradients.step_clock import StepClock

# DDP's option by which a forward pass leaves buffers alone; PyTorch 2.13 gave it another name.
_FORWARD_SYNC = inspect.signature(DistributedDataParallel).parameters.keys() & {"forward_sync_buffers"}
_OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _FORWARD_SYNC else "broadcast_buffers": False}


@dataclass
class _Bucket:
    exchange: SliceExchange
    buffer: Tensor
    parameters: list[Tensor]
    future: Future[Tensor]


class AggregationHook:
    """The state of :func:`aggregation_hook`: register one on one model.

    The processes' gradients are taken as one environment's each, whatever was accumulated in them under
    ``no_sync()``. The result replaces the average that DDP would have formed.

    Args:
        rule: the aggregator.
        rescale: divide each parameter tensor's update by its kept fraction.
        nonfinite: ``raise`` ends backward in every process with an error that names the process's environment and
            the step (to go on after it, wrap the model in DDP anew, as after any error in a hook); ``skip`` leaves
            that environment out of the step. Then no bucket can be aggregated before all are there, so nothing
            overlaps with backward any more.
        environment: this process's name in errors; ``rank N`` if None.
        group: the process group of the DDP model; None is the default group.
        clock: is told what part of a step time goes to.

    Attributes:
        step: how many backward passes were aggregated.
        skipped: names of the environments left out of the last one.
        skipped_total: how often an environment was left out so far.
    """

    def __init__(
        self,
        rule: Aggregator,
        *,
        rescale: bool = False,
        nonfinite: NonFinite = "raise",
        environment: str | None = None,
        group: dist.ProcessGroup | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self._clock = clock
        self.rule = rule
        self.rescale = rescale
        self.nonfinite = nonfinite
        self.group = group
        names: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(names, environment or f"rank {dist.get_rank(group)}", group=group)
        self.environments = [[name] for name in names]
        self.step = 0
        self.skipped: tuple[str, ...] = ()
        self.skipped_total = 0
        self._kept: dict[int, Tensor] = {}
        self._exchanges: dict[tuple[int, torch.dtype, tuple[int, ...]], SliceExchange] = {}
        self._waiting: list[_Bucket] = []
        self._sent: list[_Bucket] = []

    def kept_fraction(self, parameter: Tensor) -> Tensor:
        """The part of this parameter's components that the last backward pass kept, a float32 number in [0, 1].

        Raises:
            KeyError: the parameter was in no aggregated bucket.
        """
        return self._kept[id(parameter)]

    def aggregate(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Take a bucket on; its future is done when the last bucket of this backward pass was taken on."""
        buffer = bucket.buffer()
        parameters = list(bucket.parameters())
        key = (bucket.index(), buffer.dtype, tuple(parameter.numel() for parameter in parameters))
        if key not in self._exchanges:
            if bucket.index() == 0:  # DDP lays its buckets out anew after the first pass
                self._exchanges.clear()
            self._exchanges[key] = SliceExchange(
                self.rule,
                key[2],
                buffer.dtype,
                accumulation_dtype([buffer.dtype]),
                buffer.device,
                self.group,
                self.environments,
                mapped=False,
                rescale=self.rescale,
                nonfinite=self.nonfinite,
                clock=self._clock,
            )
        future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        self._waiting.append(_Bucket(self._exchanges[key], buffer, parameters, future))
        if self.nonfinite == "raise":
            self._send(_present(buffer))
        elif bucket.is_last():
            self._send(torch.stack([_present(waiting.buffer) for waiting in self._waiting]).amin(0))
        if bucket.is_last():
            self._receive()
        return future

    def _send(self, present: Tensor) -> None:
        # A bucket's second phase starts when the next bucket is there: its first phase had that long to travel
        # beside backward, and every process starts its messages in the same order.
        for bucket in self._waiting:
            bucket.exchange.send({"gradient": bucket.buffer}, present)
            if self._sent:
                self._sent[-1].exchange.finish(self._sent[-1].buffer)
            self._sent.append(bucket)
        self._waiting = []

    def _receive(self) -> None:
        sent, self._sent = self._sent, []
        sent[-1].exchange.finish(sent[-1].buffer)
        step, self.step = self.step, self.step + 1
        skipped: tuple[str, ...] = ()
        bad: dict[str, None] = {}
        for bucket in sent:
            try:
                kept, skipped = bucket.exchange.receive(bucket.buffer, step)
            except NonFiniteGradientError as error:  # another bucket may name another environment, or be under way
                bad.update(dict.fromkeys(error.environments))
                continue
            for parameter, fraction in zip(bucket.parameters, kept, strict=True):
                self._kept[id(parameter)] = fraction
            bucket.future.set_result(bucket.buffer)
        if bad:
            raise NonFiniteGradientError([name for (name,) in self.environments if name in bad], step)
        self.skipped = skipped
        self.skipped_total += len(skipped)


def aggregation_hook(state: AggregationHook, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """The communication hook itself, for ``register_comm_hook(state, aggregation_hook)``."""
    return state.aggregate(bucket)


def register_aggregation_hook(
    model: DistributedDataParallel,
    rule: Aggregator,
    *,
    rescale: bool = False,
    nonfinite: NonFinite = "raise",
    environment: str | None = None,
    clock: StepClock | None = None,
) -> AggregationHook:
    """Aggregate the gradients of a DDP model with ``rule``, every process being one environment.

    Call it in every process, before the first backward pass. Arguments as for :class:`AggregationHook`.

    From then on a forward pass for training raises InputError if a parameter was frozen, unfrozen or exchanged since,
    which DDP does not notice, and so does ``model.join()``: a process without batches would take part as an
    environment of gradient zero.
    """
    hook = AggregationHook(
        rule,
        rescale=rescale,
        nonfinite=nonfinite,
        environment=environment,
        group=model.process_group,
        clock=clock,
    )
    model.register_comm_hook(hook, aggregation_hook)
    model.register_forward_pre_hook(functools.partial(_check_parameters, trainable(model.module)))
    model.join_hook = _refuse_to_join  # type: ignore[method-assign]  # Join() asks each of its models for it
    return hook


def _check_parameters(known: dict[str, nn.Parameter], model: DistributedDataParallel, _: object) -> None:
    if torch.is_grad_enabled():
        require_unchanged(model.module, known)


def _refuse_to_join(**_: Any) -> NoReturn:
    raise InputError(
        "model.join(): uneven numbers of batches cannot be aggregated, since a rule needs every environment at every "
        "step; give all processes the same number"
    )


class HookedGradients:
    """A gradient source for one environment a process: a plain backward pass through a DDP model with the hook.

    Dropout and batch norm work as they always do in that process. Batch norm's running statistics follow this
    process's environment, so they are not synchronized; average them before evaluation.

    Args:
        model: the model; it is wrapped, and stays the module whose ``grad`` fields are filled.
        loss: maps outputs and targets to a scalar, the mean over the batch.
        rule, rescale, nonfinite, environment, clock: as for :class:`AggregationHook`.
        find_unused_parameters: as for DDP: the loss does not depend on all parameters.
        autocast: the dtype that ``torch.autocast`` is to compute layers in; the loss gets float32. None: as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        rule: Aggregator,
        *,
        rescale: bool = False,
        nonfinite: NonFinite = "raise",
        environment: str | None = None,
        find_unused_parameters: bool = False,
        autocast: torch.dtype | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self._autocast = autocast
        self._parameters = list(trainable(model).values())
        device = self._parameters[0].device
        self._model = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=find_unused_parameters,
            **_OWN_BUFFERS,
        )
        self._loss = loss
        self.hook = register_aggregation_hook(
            self._model, rule, rescale=rescale, nonfinite=nonfinite, environment=environment, clock=clock
        )

    def __call__(self, inputs: Tensor, targets: Tensor, step: int) -> EnvironmentStep:
        """One step: ``inputs`` and ``targets`` are ``(1, batch, ...)``; see :class:`EnvironmentStep`."""
        self.hook.step = step
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._loss(outputs_of(self._model, inputs[0], self._autocast), targets[0])
        loss.backward()
        kept = torch.stack([self.hook.kept_fraction(parameter) for parameter in self._parameters])
        return EnvironmentStep(loss.detach()[None], kept, self.hook.skipped)


def _present(buffer: Tensor) -> Tensor:
    # Extremes, since a sum of finite numbers may overflow; as fast as a sum, and twenty times as isfinite().all().
    lowest, highest = buffer.aminmax()
    return torch.where(torch.isfinite(lowest) & torch.isfinite(highest), 1.0, -1.0)[None]
