"""Sums the statistics of several processes' environments, applies the rule, and sends every process the update.

Every process owns one slice of the components. In the first phase (all-to-all) it receives all processes' statistics of
its slice, adds them and applies the rule. In the second phase it sends its slice of the update to all others. So each
process sends 2 · (w-1)/w gradients, as in an all-reduce of the plain gradient.

If every process has one environment, the gradients themselves are sent, and the receivers form the statistics. If
processes have several environments, they send sums; sums of whole numbers as the smallest integer type (signs as one
byte beside a gradient's four), which are added in floating point by the receiver. For rules that compare environments
the processes send all gradients. The inner products of weightings are formed slice by slice and added by a further
message of d × d numbers. Once a step the processes exchange the kept fractions of the layers.

Messages are sent from, and received in, the caller's memory: packing would take two more passes. On a GPU the wait, the
rule and the second phase have a stream of their own, so the backward pass continues. Measurements are in
``docs/gradients.md``.
"""

import atexit
import functools
import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from concord.aggregation import ColumnRule, Rule, Statistics, Weighting, sum_over_environments, weights_of
from concord.aggregation.column_rule import WeightedSum
from concord.aggregation.rule import accumulation_dtype
from concord.aggregation.weighting import products_of
from concord.errors import InputError
from concord.gradients.finish import combine_in_blocks, component_counts, finish_in_blocks, poison, rescale_layers
from concord.gradients.layout import Layers
from concord.gradients.nonfinite import NonFiniteGradientError
from concord.gradients.step import Aggregation


@dataclass(frozen=True)
class Processes:
    """The processes of a group (None: the default group), and the names of every process's environments."""

    group: dist.ProcessGroup | None
    names: tuple[tuple[str, ...], ...]
    rank: int

    @staticmethod
    def of(names: Sequence[str], group: dist.ProcessGroup | None) -> "Processes":
        """The processes of the group; this process has the environments of these names."""
        everyones: list[tuple[str, ...]] = [()] * dist.get_world_size(group)
        dist.all_gather_object(everyones, tuple(names), group=group)
        return Processes(group, tuple(everyones), dist.get_rank(group))

    def __post_init__(self) -> None:
        for rank, names in enumerate(self.names):
            if not names:
                raise InputError(f"process {rank} of the group has no environment, expected at least 1")

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of environments of each process."""
        return tuple(map(len, self.names))

    @property
    def total(self) -> int:
        """The number of environments of all processes."""
        return sum(self.counts)

    @property
    def most(self) -> int:
        """The largest number of environments of one process."""
        return max(self.counts)

    def gathered(self, own: Tensor) -> Tensor:
        """The tensor ``own`` of every process, ``(processes, *shape)``; waits for all."""
        result = own.new_zeros((len(self.names), *own.shape))
        for work in self.share(list(result.unbind()), own):
            work.wait()
        return result

    def by_environment(self, gathered: Tensor) -> Tensor:
        """Every process's rows of its environments, ``(processes, most, ...)``, one after the other."""
        return torch.cat([row[:count] for row, count in zip(gathered, self.counts, strict=True)])

    def share(self, parts: Sequence[Tensor], own: Tensor) -> list[Any]:
        """Start to send ``own`` to every process, and to receive theirs in ``parts``, of known sizes."""
        if own.is_cuda:
            return [dist.all_gather(list(parts), own, group=self.group, async_op=True)]
        # Gloo's all-gather is a ring; messages to everybody at once take two thirds of its time, and no time of others.
        if parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].copy_(own)
        others = [other for other in range(len(parts)) if other != self.rank]
        works = [dist.irecv(parts[each], group=self.group, group_src=each) for each in others if len(parts[each]) > 0]
        return works + [dist.isend(own, group=self.group, group_dst=each) for each in others if len(own) > 0]


def owned_slices(components: int, processes: int) -> list[slice]:
    """Each process's slice of ``components``: equal widths, and the last one also takes the remainder."""
    width = components // processes
    edges = [rank * width for rank in range(processes)] + [components]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


def sent_dtypes(rule: Rule, dtype: torch.dtype, environments: int, *, sends_statistics: bool) -> dict[str, torch.dtype]:
    """The dtype in which each statistic leaves a process, of at most ``environments`` a process."""
    if not sends_statistics or isinstance(rule, Weighting | ColumnRule):
        return {"gradient": dtype}
    return {each.name: each.wire_dtype(environments, dtype) for each in rule.statistics}


@functools.cache  # once a process
def _let_threads_finish_at_exit() -> None:
    # Gloo's threads give a message's tensors back to Python some moments after its wait() has returned; one that does
    # so while the interpreter ends aborts the process (PyTorch's pull request 179291). A program that ends right after
    # a backward pass died in one of ten runs.
    atexit.register(time.sleep, 0.05)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _as_transported(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes: neither gloo nor NCCL moves int16."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.int16 else tensor


class SliceExchange:
    """The exchange of one flat run of components between the processes of a group.

    Call :meth:`send` and :meth:`apply_rule` in this order, in every process, and then :func:`complete` once for all
    exchanges of the step; messages are sent between the calls. Buffers are kept for the next step.

    Args:
        aggregation: the rule, and how it is applied.
        layers: the layers of the run.
        dtype: the dtype of the gradients or sums that are sent.
        device: their device.
        processes: the processes of the group.
        sends_statistics: whether processes send sums of statistics; otherwise they send the gradients of all their
            environments, and the receivers form the statistics.
    """

    def __init__(
        self,
        aggregation: Aggregation,
        layers: Layers,
        dtype: torch.dtype,
        device: torch.device,
        processes: Processes,
        sends_statistics: bool,
    ) -> None:
        self.aggregation = aggregation
        self.rule = aggregation.rule
        self.layers = layers
        self.processes = processes
        self.device = device
        if device.type == "cpu":
            _let_threads_finish_at_exit()
        self.sends_statistics = sends_statistics
        self._dtype = accumulation_dtype([dtype])
        self._slices = owned_slices(sum(layers.sizes), len(processes.names))
        self._own = self._slices[processes.rank]
        self._sizes = [part.stop - part.start for part in self._slices]
        self._wire = sent_dtypes(self.rule, dtype, processes.most, sends_statistics=sends_statistics)
        if aggregation.nonfinite != "raise" and (aggregation.policy == "propagate" or aggregation.scaler is not None):
            # What is not finite cannot travel as an integer.
            self._wire = {name: torch.promote_types(wire, dtype) for name, wire in self._wire.items()}
        own = self._sizes[processes.rank]
        self._rows = [1] * len(self._sizes) if sends_statistics else list(processes.counts)
        self._got = {
            name: torch.zeros(sum(self._rows), own, dtype=wire, device=device) for name, wire in self._wire.items()
        }
        self._works: list[Any] = []
        self._under_way: list[Tensor] = []
        # What complete() needs of this step.
        self.out = torch.empty(0, device=device)
        self.kept = torch.empty(0, device=device)
        self.present = torch.empty(0, device=device)
        self.gram = torch.empty(0)

    def send(self, contributions: Statistics, present: Tensor) -> None:
        """Start the first phase.

        Args:
            contributions: ``gradient`` alone, or the summed statistics; each flat, of all components, contiguous, or as
                :meth:`send_rows` has several gradients. They must not change before :meth:`apply_rule`.
            present: ``(local environments,)`` float32: 1 for an environment that is in the contributions, -1 for
                one whose gradient is not finite.
        """
        before = self.aggregation.clock.switch("exchange")
        self.present = torch.nn.functional.pad(present, (0, self.processes.most - len(present)))
        for name, wire in self._wire.items():
            outgoing = _as_transported(contributions[name].to(wire))
            incoming = _as_transported(self._got[name].view(-1))
            width = wire.itemsize // outgoing.itemsize
            self._under_way.append(outgoing)
            self._works.append(
                dist.all_to_all_single(
                    incoming,
                    outgoing,
                    output_split_sizes=[self._sizes[self.processes.rank] * width * rows for rows in self._rows],
                    input_split_sizes=[size * width * self._rows[self.processes.rank] for size in self._sizes],
                    group=self.processes.group,
                    async_op=True,
                )
            )
        self.aggregation.clock.switch(before)

    def send_rows(self, rows: Tensor, present: Tensor) -> None:
        """Start the first phase with the gradients ``(local environments, components)``."""
        self.send({"gradient": torch.cat([rows[:, part].reshape(-1) for part in self._slices])}, present)

    def form_gram(self, dtype: torch.dtype = torch.float32) -> None:
        """Wait for the first phase, and form the inner products of all environments in this process's slice.

        They are formed in ``dtype`` or a wider one, and stay on the device.
        """
        before = self.aggregation.clock.switch("exchange")
        with self._aside():
            self._wait()
            self.aggregation.clock.switch("optimizer")
            rows = self._got["gradient"]
            self.gram = products_of(rows, torch.promote_types(rows.dtype, dtype))
        self.aggregation.clock.switch(before)

    def apply_rule(
        self,
        out: Tensor,
        step: int,
        presence: Tensor | None = None,
        scale: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Wait for the first phase, put this process's slice of the update into ``out``, start the second phase.

        Args:
            out: flat, of all components, in the sent dtype; it may be the sent memory.
            step: the step's number, for rules that draw at random.
            presence: all processes' ``present``, ``(processes, most environments)``, if environments that are not
                finite are left out; None includes all. Reading it makes the host wait for the device.
            scale: the factor of the sent gradients, by which the update is multiplied; None for 1.
            weights: the weights of all environments, if the rule is a weighting.
        """
        clock = self.aggregation.clock
        before = clock.switch("exchange")
        with self._aside():
            self._wait()
            clock.switch("optimizer")
            rows: slice | Tensor = slice(None)
            environments = self.processes.total
            if presence is not None:
                by_row = presence if self.sends_statistics else self.processes.by_environment(presence)[:, None]
                present = by_row.clamp(min=0).sum(1)
                environments = int(present.sum())
                if bool((present == 0).any()):
                    rows = present.nonzero().flatten()
            own = out[self._own]
            rule: Any = self.rule if weights is None else WeightedSum(weights)
            if isinstance(rule, ColumnRule):
                self.kept = self.kept.new_zeros(len(self.layers.sizes))
                if environments > 0:
                    combine_in_blocks(rule, lambda block: self._gradients(rows, block, scale), own)
                else:
                    own.zero_()
            else:
                self.kept = finish_in_blocks(
                    rule,
                    lambda block: self._sums(rows, block, scale),
                    own,
                    self.layers,
                    self._own.start,
                    environments,
                    step,
                )
            if scale is not None:
                own.mul_(scale)
            clock.switch("exchange")
            self._share(out)
        self.out = out
        clock.switch(before)

    def report(self) -> Tensor:
        """The kept components of each layer in this process, which the other processes need beside its slice."""
        self.join()
        return self.kept

    def join(self) -> None:
        """Let what follows use what was computed aside; on a GPU its stream waits, and the host does not."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(_stream(self.device))

    def receive(self, reports: Tensor, finite: Tensor) -> Tensor:
        """Wait for the second phase, and rescale; return the kept fraction of each layer, float32.

        The scalar ``finite`` is not finite if an environment in the sums is not finite.
        """
        self._wait()
        self._under_way = []
        kept_fraction: Tensor = reports.sum(0) / component_counts(self.layers, self.device)
        if self.aggregation.policy == "propagate":
            poison(self.out, finite)
        if self.aggregation.rescale:
            rescale_layers(self.out, self.layers, kept_fraction)
        return kept_fraction

    def _gradients(self, rows: slice | Tensor, block: slice, scale: Tensor | None) -> Tensor:
        gradients = self._got["gradient"][rows, block].to(self._dtype)
        return gradients if scale is None else gradients / scale

    def _sums(self, rows: slice | Tensor, block: slice, scale: Tensor | None) -> Statistics:
        rule: Any = self.rule
        if not self.sends_statistics:
            return sum_over_environments(rule, self._gradients(rows, block, scale))
        return {
            each.name: self._got[each.name][rows, block].sum(0, dtype=torch.promote_types(self._dtype, each.dtype))
            for each in rule.statistics
        }

    def _share(self, out: Tensor) -> None:
        """Start to send this process's slice to all, and to receive theirs."""
        slices = [out[part] for part in self._slices]
        own = out[self._own]
        # On a GPU from a copy: what is gathered lies in the same memory.
        self._under_way.append(own.clone() if own.is_cuda else own)
        self._works += self.processes.share(slices, self._under_way[-1])

    def _aside(self) -> AbstractContextManager[object]:
        if self.device.type != "cuda":
            return nullcontext()
        stream = _stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # that made scale, presence and the memory
        return torch.cuda.stream(stream)

    def _wait(self) -> None:
        # What is under way is kept until receive(): aside only that stream waits for it, and the backward pass, to
        # which its memory would return, does not.
        for work in self._works:
            work.wait()
        self._works = []


def weights_of_slices(exchanges: Sequence[SliceExchange], step: int, scale: Tensor | None = None) -> Tensor:
    """The weights of the environments of all processes, ``(environments,)`` float64, the same in every process.

    The exchanges have the inner products of all slices, in the same order in all processes. The weight of an
    environment that is not finite is 0. The gradients that were sent are multiplied by ``scale``.
    """
    first = exchanges[0]
    rule, aggregation, processes = first.rule, first.aggregation, first.processes
    assert isinstance(rule, Weighting)
    before = aggregation.clock.switch("exchange")
    present = torch.stack([exchange.present for exchange in exchanges]).amin(0)
    flags, products = _gathered_products(exchanges, present)
    if not bool(products.isfinite().all()):  # of large gradients they overflow
        for exchange in exchanges:
            exchange.form_gram(torch.float64)
        flags, products = _gathered_products(exchanges, present)
    aggregation.clock.switch(before)
    gram = products.sum(0).view(processes.total, processes.total)
    if scale is not None:
        gram = gram / float(scale) ** 2
    left = (processes.by_environment(flags) > 0) & torch.isfinite(gram.diagonal())
    weights = torch.zeros(processes.total, dtype=torch.float64, device="cpu")
    if bool(left.all()) or (aggregation.policy == "skip" and bool(left.any())):
        weights[left] = weights_of(rule, gram[left][:, left], step)
    return weights


def _gathered_products(exchanges: Sequence[SliceExchange], present: Tensor) -> tuple[Tensor, ...]:
    """Every process's ``present`` and inner products, on the host, which waits for them."""
    exchanges[0].join()
    partial = torch.stack([exchange.gram for exchange in exchanges]).sum(0)
    message = torch.cat([present.double(), partial.flatten()])
    # Added by every process in the same order: not all ways to reduce give all processes the same bits.
    gathered = exchanges[0].processes.gathered(message).cpu()
    parts: tuple[Tensor, ...] = gathered.split([len(present), partial.numel()], 1)
    return parts


def complete(exchanges: Sequence[SliceExchange], step: int) -> tuple[list[Tensor], tuple[str, ...]]:
    """Wait for all exchanges of a step, in the same order in all processes; reports beside the update travel once.

    Returns the kept fraction of each layer (float32) for each exchange, and the names of the environments that were
    left out. With ``nonfinite="raise"`` an environment that is not finite ends the step in every process
    (NonFiniteGradientError).
    """
    first = exchanges[0]
    aggregation, processes = first.aggregation, first.processes
    before = aggregation.clock.switch("exchange")
    present = torch.stack([exchange.present for exchange in exchanges]).amin(0)
    reports = [exchange.report() for exchange in exchanges]
    gathered = processes.gathered(torch.cat([present, *reports]))
    flags, *of_exchanges = gathered.split([len(present), *map(len, reports)], 1)
    policy = aggregation.policy
    finite = torch.where((flags < 0).any(), torch.inf, 0.0)
    aggregation.clock.switch("optimizer")
    kept = [exchange.receive(part, finite) for exchange, part in zip(exchanges, of_exchanges, strict=True)]
    aggregation.clock.switch(before)
    if policy == "propagate":
        return kept, ()
    bad = tuple(
        name
        for names, row in zip(processes.names, flags.tolist(), strict=True)
        for name, flag in zip(names, row, strict=False)
        if flag < 0
    )
    if bad and policy == "raise":
        raise NonFiniteGradientError(bad, step)
    return kept, bad
