"""Sum the statistics of environments in several processes, finish them, and give every process the whole update.

Every process owns one slice of the components. In the first phase (all-to-all) it gets that slice of everybody's
statistics, adds them and applies the rule; in the second it shares its slice of the update. That moves
2 · (w-1)/w gradients a process, exactly what an all-reduce of the plain gradient moves, and no sign crosses the
network at all where every process has one environment: the gradients themselves arrive, and the receiver maps them.
Where processes hold several environments each, their sums travel, with signs as one byte beside a gradient's four
(two bytes where a process has 128 environments or more; the counts of several processes are added only after they
arrived, in floating point). What a process kept of each layer is a few numbers beside that.

What it was measured against (``concord bench --only exchange``: 4 gloo processes on 2 cores, 6.5 million float32
components), as multiples of the time of a plain all-reduce of the gradient, least and largest median ratio of three
runs on a noisy machine:

====================================================================  ============
all-reduce of gradients, then all-reduce of signs as int8              2.26 to 2.50
all-to-all, rule on a whole slice, all-gather                          1.65 to 1.66
all-to-all, rule on blocks of a slice, all-gather                      1.52 to 1.87
all-to-all, rule on blocks of a slice, a broadcast of each slice       1.49 to 1.70
====================================================================  ============

The slices beat signs of their own by far; among themselves they are within the machine's noise, with the broadcasts
the lowest in two runs of three, and they need no slices of equal size.
Gradients leave from, and updates arrive in, the caller's own memory: packing them into one message would cost
two passes over it.
"""

import atexit
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from concord.aggregation import Aggregator, Statistics, rescaling_factor, sum_over_environments
from concord.errors import InputError
from concord.gradients.nonfinite import NonFinite, NonFiniteGradientError
from concord.gradients.step_clock import StepClock

# Components of a slice that are summed and finished at once on a CPU, so that they stay in its cache.
_BLOCK = 1 << 15


def count_dtype(environments: int) -> torch.dtype:
    """The smallest integer dtype that holds a sum of ``environments`` signs."""
    for dtype in (torch.int8, torch.int16):
        if environments <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def owned_slices(components: int, processes: int) -> list[slice]:
    """Each process's slice of ``components``: of one width, but for the last ones, which may be shorter or empty."""
    width = -(-components // processes)
    edges = [min(rank * width, components) for rank in range(processes + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


def sent_dtypes(
    rule: Aggregator, dtype: torch.dtype, environments: Sequence[int], *, mapped: bool
) -> dict[str, torch.dtype]:
    """The dtype in which each statistic leaves a process.

    Args:
        rule: the aggregator.
        dtype: of the gradients, or of the sums.
        environments: of every process.
        mapped: whether processes send sums of statistics, or the gradients of their only environments.
    """
    if not mapped:
        return {"gradient": dtype}
    return {name: count_dtype(max(environments)) if name == "sign" else dtype for name in rule.map(torch.ones(1))}


@functools.cache  # once a process
def _let_threads_finish_at_exit() -> None:
    # Gloo's threads give a message's tensors back to Python some moments after its wait() has returned; one that does
    # so while the interpreter ends aborts the process (PyTorch's pull request 179291). A program that ends right after
    # a backward pass died in one of ten runs.
    atexit.register(time.sleep, 0.05)


def _as_transported(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes: neither gloo nor NCCL moves int16."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.int16 else tensor


class SliceExchange:
    """The exchange of one flat run of components between the processes of a group.

    Call :meth:`send`, :meth:`finish` and :meth:`receive` in this order, in every process; between the calls the
    messages are under way. Buffers are kept for the next step.

    Args:
        rule: the aggregator.
        layer_sizes: components of each layer (parameter tensor), in the order in which they lie.
        dtype: dtype of what is sent: of the gradients, or of the sums.
        accumulation: dtype in which it is summed.
        device: where it lies.
        group: the process group; None is the default group.
        environments: names of every process's environments; the same in all processes.
        mapped: False if processes send gradients of their only environment, which the receivers map; True if
            they send sums of statistics.
        rescale: divide each layer by its kept fraction.
        nonfinite: what to do about an environment that :meth:`send` marks as not finite.
        clock: is told when time goes to the exchange, and when to the update.

    Raises:
        InputError: a process has no environment (in every process).
    """

    def __init__(
        self,
        rule: Aggregator,
        layer_sizes: Sequence[int],
        dtype: torch.dtype,
        accumulation: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        environments: Sequence[Sequence[str]],
        *,
        mapped: bool,
        rescale: bool,
        nonfinite: NonFinite,
        clock: StepClock | None = None,
    ) -> None:
        for rank, names in enumerate(environments):
            if not names:
                raise InputError(f"process {rank} of the group has no environment, expected at least 1")
        self.rule = rule
        self.group = group
        self.environments = environments
        self.nonfinite = nonfinite
        self.mapped = mapped
        self.rescale = rescale
        self.accumulation = accumulation
        self._clock = clock or StepClock()
        if device.type == "cpu":
            _let_threads_finish_at_exit()
        world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.total = sum(map(len, environments))
        self._slices = owned_slices(sum(layer_sizes), world)
        self._sizes = [part.stop - part.start for part in self._slices]
        self._layers = torch.tensor(layer_sizes, dtype=torch.float32, device=device)
        ends = torch.tensor(layer_sizes).cumsum(0).tolist()
        self._layer_slices = [slice(end - size, end) for end, size in zip(ends, layer_sizes, strict=True)]
        self._wire = sent_dtypes(rule, dtype, [len(names) for names in environments], mapped=mapped)
        own = self._sizes[self.rank]
        self._got = {name: torch.zeros(world, own, dtype=wire, device=device) for name, wire in self._wire.items()}
        self._kept = torch.zeros(own, dtype=accumulation, device=device)
        # What every process says beside its slice: what it kept of each layer, then whether each of its
        # environments takes part (1), does not exist (0), or is not finite (-1).
        most = max(map(len, environments))
        self._reports = torch.zeros(world, len(layer_sizes) + most, dtype=torch.float32, device=device)
        self._report = torch.zeros_like(self._reports[0])
        self._works: list[Any] = []
        self._under_way: list[Tensor] = []

    def send(self, contributions: Statistics, present: Tensor) -> None:
        """Start the first phase.

        Args:
            contributions: ``gradient`` alone, or the summed statistics; each flat, of all components, contiguous.
                They must not change before :meth:`finish`.
            present: ``(local environments,)`` float32: 1 for an environment that is in the contributions, -1 for
                one whose gradient is not finite.
        """
        before = self._clock.switch("exchange")
        self._report.zero_()
        self._report[len(self._layers) : len(self._layers) + len(present)] = present
        for name, wire in self._wire.items():
            outgoing = _as_transported(contributions[name].to(wire))
            incoming = _as_transported(self._got[name].view(-1))
            width = wire.itemsize // outgoing.itemsize
            self._under_way.append(outgoing)
            self._works.append(
                dist.all_to_all_single(
                    incoming,
                    outgoing,
                    output_split_sizes=[self._sizes[self.rank] * width] * len(self._sizes),
                    input_split_sizes=[size * width for size in self._sizes],
                    group=self.group,
                    async_op=True,
                )
            )
        if self.nonfinite == "skip":  # who takes part has to be known before the sums are finished
            self._share_reports()
        self._clock.switch(before)

    def finish(self, out: Tensor) -> None:
        """Wait for the first phase, put this process's slice of the update into ``out``, start the second phase.

        Args:
            out: flat, of all components, dtype as sent; it may be the very memory that was sent.
        """
        before = self._clock.switch("exchange")
        self._wait()
        self._clock.switch("optimizer")
        rows: slice | Tensor = slice(None)
        environments = self.total
        if self.nonfinite == "skip":
            # Reading which environments are left out makes the host wait for the device: only on request.
            present = self._reports[:, len(self._layers) :].clamp(min=0).sum(1)
            environments = int(present.sum())
            if bool((present == 0).any()):
                rows = present.nonzero().flatten()
        self._finish_slice(out[self._slices[self.rank]], rows, environments)
        self._clock.switch("exchange")
        self._share_reports()
        self._works += [
            dist.broadcast(out[part], group=self.group, group_src=rank, async_op=True)
            for rank, part in enumerate(self._slices)
            if self._sizes[rank] > 0
        ]
        self._clock.switch(before)

    def receive(self, out: Tensor, step: int) -> tuple[Tensor, tuple[str, ...]]:
        """Wait for the second phase.

        Args:
            out: as given to :meth:`finish`; now holds the update.
            step: for the error message.

        Returns:
            The kept fraction of each layer (float32), and the names of the environments that were left out.

        Raises:
            NonFiniteGradientError: an environment of any process was marked as not finite (in every process).
        """
        before = self._clock.switch("exchange")
        self._wait()
        flags = self._reports[:, len(self._layers) :].tolist()
        bad = tuple(
            name
            for names, row in zip(self.environments, flags, strict=True)
            for name, flag in zip(names, row, strict=False)
            if flag < 0
        )
        if bad and self.nonfinite == "raise":
            raise NonFiniteGradientError(bad, step)
        self._clock.switch("optimizer")
        kept_fraction = self._reports[:, : len(self._layers)].sum(0) / self._layers
        if self.rescale:
            # Where nothing was kept the factor is 1e10, which float16 would round to infinity, and 0 · ∞ to nan.
            largest = torch.finfo(out.dtype).max
            factors = rescaling_factor(kept_fraction).to(out.dtype).clamp(max=largest).unbind()
            for layer, factor in zip(self._layer_slices, factors, strict=True):
                out[layer].mul_(factor)
        self._clock.switch(before)
        return kept_fraction, bad

    def _share_reports(self) -> None:
        rows = list(self._reports.unbind())
        self._works.append(dist.all_gather(rows, self._report, group=self.group, async_op=True))

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._under_way = [], []

    def _finish_slice(self, out: Tensor, rows: slice | Tensor, environments: int) -> None:
        own = self._slices[self.rank]
        if environments == 0:
            out.zero_()
            return
        width = len(out) if out.is_cuda else _BLOCK
        for start in range(0, len(out), max(width, 1)):
            block = slice(start, start + width)
            if self.mapped:
                sums = {name: part[rows, block].sum(0, dtype=self.accumulation) for name, part in self._got.items()}
            else:
                sums = sum_over_environments(self.rule, self._got["gradient"][rows, block].to(self.accumulation))
            out[block], self._kept[block] = self.rule.finish(sums, environments)
        for index, layer in enumerate(self._layer_slices):
            part = slice(max(layer.start, own.start) - own.start, min(layer.stop, own.stop) - own.start)
            if part.start < part.stop:
                self._report[index] = self._kept[part].sum()
