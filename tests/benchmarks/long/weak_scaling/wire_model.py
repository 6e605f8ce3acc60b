"""A model of the traffic of a step's exchange, for any number of workers.

The calls, slices and dtypes are those of :mod:`concord.gradients.exchange`. The messages of a call are gloo's: in an
all-to-all, and when slices of the update are shared, a message to each other worker; in an all-reduce a ring (each
worker's chunk in segments of at most 1 MiB, at least two). ``tests/gradients/wire_checks.py`` compares the model with
the traffic of real processes.

All numbers are per step; a worker is a process of the group.
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

# Gloo's TCP transport announces each message from both sides and puts a header before it: 48 bytes each.
CONTROL_BYTES = 3 * 48
# Largest message of gloo's all-reduce, bytes.
_SEGMENT = 1 << 20
# DDP closes a bucket at this size: the first of a pass, and all others.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """The traffic of a step's collectives.

    Attributes:
        calls: number of collectives that every worker issues.
        payload: ``(workers,)`` bytes of the tensors that each worker contributes to the collectives.
        sent: ``(workers,)`` bytes of tensors that each worker sends to others.
        messages: ``(workers,)`` number of messages that each worker sends.
        worked_on: number of numbers that a worker adds or maps, in its own memory.
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
        """The number of workers."""
        return len(self.payload)

    @property
    def wire(self) -> Counts:
        """``(workers,)`` bytes given to TCP: tensors and gloo's announcements, without the headers of TCP and IP.

        The receiver sends one of a message's announcements. A worker receives about as many messages as it sends, so
        only the sum over workers is exact.
        """
        return self.sent + CONTROL_BYTES * self.messages


def step_traffic(
    rule: Aggregator, layer_sizes: Sequence[int], workers: int, environments: int, *, dtype: torch.dtype = torch.float32
) -> Traffic:
    """The traffic of a step with ``environments`` environments for each worker.

    With one environment the hook exchanges the gradient, bucket by bucket; with several environments the two-level form
    exchanges all sums at once.

    Args:
        rule: the aggregator.
        layer_sizes: number of components of each parameter tensor, in the model's order.
        workers: number of workers.
        environments: number of environments of each worker.
        dtype: dtype of the gradients. Sums have the same dtype, but at least float32.
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
    """One :class:`~concord.gradients.exchange.SliceExchange` of workers with this number of environments each."""
    components = sum(layer_sizes)
    owned = np.array([part.stop - part.start for part in owned_slices(components, workers)])
    dtypes = sent_dtypes(rule, dtype, environments, sends_statistics=sends_statistics).values()
    parts = [_all_to_all(owned * each.itemsize) for each in dtypes]
    parts.append(_to_each_other(owned * dtype.itemsize))
    # A worker receives all workers' sums for its slice: as many numbers as the model has components.
    return sum(parts, _nothing(workers, worked_on=len(rule.statistics) * components))


def report_traffic(runs: Sequence[Sequence[int]], workers: int, environments: int) -> Traffic:
    """The traffic of a step's report: the participating workers, and the kept fraction of each layer of these runs."""
    return _to_each_other(np.full(workers, 4 * (environments + sum(map(len, runs)))))


def all_reduce_traffic(layer_sizes: Sequence[int], workers: int, *, dtype: torch.dtype = torch.float32) -> Traffic:
    """The traffic of a step of plain DDP: an all-reduce of every bucket."""
    total = _nothing(workers)
    for bucket in buckets(layer_sizes, dtype):
        total += _all_reduce(sum(bucket), dtype.itemsize, workers)
    return total


def buckets(layer_sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[list[int]]:
    """DDP's buckets of layers from the second pass on, last layers first."""
    result: list[list[int]] = [[]]
    for size in reversed(layer_sizes):
        limit = _FIRST_BUCKET if len(result) == 1 else _BUCKET
        if sum(result[-1]) * dtype.itemsize >= limit:
            result.append([])
        result[-1].append(size)
    return result


def ring_bytes(payload: int, workers: int) -> float:
    """The bytes that a worker sends in a ring all-reduce of ``payload`` bytes, in 2 (workers - 1) messages."""
    return 2 * (workers - 1) / workers * payload


class StepCost(NamedTuple):
    """Seconds of a step: the sum of the busiest worker's costs, times the number of workers that share a core.

    Attributes:
        call: seconds for each issued collective.
        message: α, seconds for each sent message (with one received message, since all workers do the same).
        byte: β, seconds for each sent byte of tensors.
        number: γ, seconds for each mapped or added number.
    """

    call: float
    message: float
    byte: float
    number: float

    def seconds(self, traffic: Traffic, cores: int | None = None) -> float:
        """The time of a step.

        Args:
            traffic: the step's traffic.
            cores: number of cores that all workers share. None: each worker has its own core.
        """
        return float(np.dot(_done(traffic, cores), self))


def fitted_cost(steps: Sequence[Traffic], seconds: Sequence[float], cores: int) -> StepCost:
    """Fit the non-negative cost with the least squared relative errors on these measured steps.

    Args:
        steps: traffic of each step.
        seconds: time of each step.
        cores: number of cores that all workers shared.
    """
    from sklearn.linear_model import LinearRegression  # the import takes a second; only a fit needs it

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
    """``parts``: bytes that every worker sends to each worker."""
    workers = len(parts)
    total = int(parts.sum())
    return Traffic(1, np.full(workers, total), total - parts, np.full(workers, workers - 1), 0)


def _to_each_other(parts: Counts) -> Traffic:
    """``parts``: bytes that each worker sends to every other one, one message each; 0 bytes make no message."""
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
