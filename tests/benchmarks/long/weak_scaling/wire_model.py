"""What a step's exchange sends, for any number of workers, computed without sending anything.

The calls are those of :mod:`concord.gradients.exchange`, with its slices and its dtypes; what becomes of a call on the
wire is gloo's: a message to each other worker in an all-to-all and where slices of the update are shared, a ring in an
all-reduce (each worker's chunk in segments of at most 1 MiB, at least two). ``tests/gradients/wire_checks.py`` compares
all of it with what real processes send.

Everything here is per step; a worker is a process of the group.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from concord.aggregation import Aggregator
from concord.gradients.exchange import owned_slices, sent_dtypes

# Gloo's TCP transport announces each message, from both sides, and puts a header before it: 48 bytes each time.
CONTROL_BYTES = 3 * 48
# The most that one message of gloo's all-reduce carries.
_SEGMENT = 1 << 20
# DDP closes a bucket when it holds this much: the first of a pass, and every other one.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """What the collectives of a step send.

    Attributes:
        calls: collectives that every worker issues.
        payload: ``(workers,)`` bytes that each hands to them: the sizes of the tensors it contributes.
        sent: ``(workers,)`` bytes of tensors that each sends to others.
        messages: ``(workers,)`` messages in which it sends them.
        worked_on: numbers that a worker adds or maps, in its own memory.
    """

    calls: int
    payload: Counts
    sent: Counts
    messages: Counts
    worked_on: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(ours + theirs for ours, theirs in zip(*map(astuple, (self, other)), strict=True)))

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.payload)

    @property
    def wire(self) -> Counts:
        """``(workers,)`` bytes that reach TCP: tensors, and what gloo says about them. Without TCP's and IP's headers.

        Of the announcements a message needs, the receiver sends one; every worker receives, in all, about as many
        messages as it sends, so that only the sum over workers is exact.
        """
        return self.sent + CONTROL_BYTES * self.messages


def step_traffic(
    rule: Aggregator, layer_sizes: Sequence[int], workers: int, environments: int, *, dtype: torch.dtype = torch.float32
) -> Traffic:
    """A step of ``environments`` environments a worker.

    With one it is the hook's (the gradient, bucket by bucket), with several the two-level form's (the sums, at once).

    Args:
        rule: the aggregator.
        layer_sizes: components of each parameter tensor, in the model's order.
        workers: how many.
        environments: of each worker.
        dtype: of the gradients; sums are of it too, and at least float32.
    """
    single = environments == 1
    sums = torch.promote_types(dtype, torch.float32)
    runs = buckets(layer_sizes, dtype) if single else [list(layer_sizes)]
    total = _nothing(workers)
    for run in runs:
        sent = dtype if single else sums
        total += exchange_traffic(rule, run, workers, environments, sent, sends_statistics=not single)
    return total + report_traffic(runs, workers, environments)


def exchange_traffic(
    rule: Aggregator,
    layer_sizes: Sequence[int],
    workers: int,
    environments: int,
    dtype: torch.dtype,
    *,
    sends_statistics: bool,
) -> Traffic:
    """One :class:`~concord.gradients.exchange.SliceExchange` of workers with so many environments each."""
    components = sum(layer_sizes)
    owned = np.array([part.stop - part.start for part in owned_slices(components, workers)])
    dtypes = sent_dtypes(rule, dtype, environments, sends_statistics=sends_statistics).values()
    parts = [_all_to_all(owned * each.itemsize) for each in dtypes]
    parts.append(_to_each_other(owned * dtype.itemsize))
    # The sums of every worker for the slice that one owns are as many numbers as the model has components.
    return sum(parts, _nothing(workers, worked_on=len(rule.statistics) * components))


def report_traffic(runs: Sequence[Sequence[int]], workers: int, environments: int) -> Traffic:
    """What workers tell each other once a step: who takes part, and what was kept of each layer of these runs."""
    return _to_each_other(np.full(workers, 4 * (environments + sum(map(len, runs)))))


def all_reduce_traffic(layer_sizes: Sequence[int], workers: int, *, dtype: torch.dtype = torch.float32) -> Traffic:
    """A step of plain DDP: an all-reduce of every bucket."""
    total = _nothing(workers)
    for bucket in buckets(layer_sizes, dtype):
        total += _all_reduce(sum(bucket), dtype.itemsize, workers)
    return total


def buckets(layer_sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[list[int]]:
    """The layers as DDP puts them into buckets from the second pass on, last layers first."""
    result: list[list[int]] = [[]]
    for size in reversed(layer_sizes):
        limit = _FIRST_BUCKET if len(result) == 1 else _BUCKET
        if sum(result[-1]) * dtype.itemsize >= limit:
            result.append([])
        result[-1].append(size)
    return result


def ring_bytes(payload: int, workers: int) -> float:
    """What a worker sends in the textbook's ring all-reduce of ``payload`` bytes, in 2 (workers - 1) messages."""
    return 2 * (workers - 1) / workers * payload


class StepCost(NamedTuple):
    """Seconds of a step: a sum over what its busiest worker does, times the workers that share a core.

    Attributes:
        call: seconds for each collective that is issued.
        message: α, for each message that is sent (and, as all do the same, one received).
        byte: β, for each byte of tensors that is sent.
        number: γ, for each number that is mapped or added.
    """

    call: float
    message: float
    byte: float
    number: float

    def seconds(self, traffic: Traffic, cores: int | None = None) -> float:
        """A step's time.

        Args:
            traffic: what the step sends.
            cores: of the machine that all its workers share; None: each has a core of its own.
        """
        return float(np.dot(_done(traffic, cores), self))


def fitted_cost(steps: Sequence[Traffic], seconds: Sequence[float], cores: int) -> StepCost:
    """The cost whose relative errors are least (in squares) on these measured steps, none of its parts negative.

    Args:
        steps: what was sent.
        seconds: how long each took.
        cores: of the machine that all workers shared.
    """
    from sklearn.linear_model import LinearRegression  # takes a second, and only a fit needs it

    rows = np.array([_done(traffic, cores) for traffic in steps]) / np.array(seconds)[:, None]
    scale = rows.max(0)  # calls and bytes differ by many powers of ten
    solved: Any = LinearRegression(positive=True, fit_intercept=False).fit(rows / scale, np.ones(len(seconds)))
    return StepCost(*(float(part) for part in solved.coef_ / scale))


def _done(traffic: Traffic, cores: int | None) -> list[float]:
    sharing = 1.0 if cores is None else max(1.0, traffic.workers / cores)
    done = (traffic.calls, traffic.messages.max(), traffic.sent.max(), traffic.worked_on)
    return [sharing * float(part) for part in done]


def _nothing(workers: int, worked_on: int = 0) -> Traffic:
    zeros = np.zeros(workers, dtype=np.int64)
    return Traffic(0, zeros, zeros, zeros, worked_on)


def _all_to_all(parts: Counts) -> Traffic:
    """``parts``: bytes that everybody sends to each worker."""
    workers = len(parts)
    total = int(parts.sum())
    return Traffic(1, np.full(workers, total), total - parts, np.full(workers, workers - 1), 0)


def _to_each_other(parts: Counts) -> Traffic:
    """``parts``: bytes that each worker sends to every other one, in a message of its own; nothing is not sent."""
    others = len(parts) - 1
    messages = others * (parts > 0)
    return Traffic(others, others * parts, others * parts, messages, 0)


def _all_reduce(components: int, itemsize: int, workers: int) -> Traffic:
    payload = components * itemsize
    if workers == 1:
        return Traffic(1, np.full(1, payload), np.zeros(1, np.int64), np.zeros(1, np.int64), 0)
    segments = _rounded_up(max(math.ceil(payload / _SEGMENT), 2 * workers), workers)
    length = _rounded_up(math.ceil(payload / segments), itemsize)
    chunks = np.clip(payload - length * np.arange(segments), 0, length).reshape(workers, -1)
    size, filled = chunks.sum(1), (chunks > 0).sum(1)
    # In the first phase a worker sends every chunk but its own, in the second every one but its neighbour's.
    spared = (np.arange(workers), np.arange(workers) - 1)
    return Traffic(
        1,
        np.full(workers, payload),
        2 * size.sum() - sum(size[chunk] for chunk in spared),
        2 * filled.sum() - sum(filled[chunk] for chunk in spared),
        components - components // workers,
    )


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
