"""The exchange between processes: exact sums of signs in small integers, no more bytes than an all-reduce."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from collective import Probe, backward, batches, ddp, environment_names, identity, local, of_two_level, two_level
from operations import Operations
from process_groups import in_processes
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import GRADIENT, SIGN, AndMask, Clipping, Median, Statistic, Statistics, Update
from concord.aggregation.asynchronous import as_asynchronous
from concord.gradients import AggregationHook, StackedGradients, aggregation_hook, register_aggregation_hook


@in_processes(2, 4, total=[127, 128, 140, 300])
def test_many_environments_are_counted_exactly(total: int) -> None:
    """Component j is negative in j environments, so |Σ sign g| = |d - 2j|; τ asks for d - 10."""
    world, rank = dist.get_world_size(), dist.get_rank()
    counts = [total // world + (1 if rank < total % world else 0) for rank in range(world)]
    rows = (torch.arange(total)[:, None] * 11) % total  # spread over the processes
    gradients = torch.where(rows < torch.arange(total + 1), -1.0, 1.0)
    threshold = (total - 10) / total
    model = Probe(total + 1)
    names = environment_names(counts)[rank]
    source = StackedGradients(model, identity, AndMask(threshold), names=names, group=dist.group.WORLD)
    mine = gradients[local(counts, rank)][:, None]
    step = source(mine, torch.zeros(mine.shape[:2]))
    signs = gradients.sum(0)
    kept = signs.abs() >= total - 10
    assert int(kept.sum()) == 12
    assert torch.equal(model.weight.grad != 0, kept)
    torch.testing.assert_close(model.weight.grad, torch.where(kept, signs / total, 0))
    torch.testing.assert_close(step.kept_fraction, kept.float().mean()[None])


@dataclass(frozen=True)
class SignSum:
    """A rule whose update is Σ sign g itself."""

    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, SIGN)

    def finish(self, sums: Statistics, environments: int) -> Update:
        return Update(sums["sign"], torch.ones_like(sums["sign"]))


@in_processes(2, 4, counts=[(127,), (128,), (127, 128), (8_192,), (32_767,), (32_768,), (1, 32_768)])
def test_sums_of_signs_are_exact_at_the_bounds_of_their_integers(counts: tuple[int, ...]) -> None:
    """All environments agree, all but one, half of them; one has a zero. 4 · 8192 are as many as 1024 · 32."""
    world, rank = dist.get_world_size(), dist.get_rank()
    each = [counts[other % len(counts)] for other in range(world)]
    total, own = sum(each), local(each, rank)
    gradients = torch.ones(total, 6)
    gradients[:, 1] = -1
    gradients[-1, 2] = -1
    gradients[1:, 3] = -1
    gradients[::2, 4] = -1
    gradients[0, 5] = 0
    model = Probe(6)
    names = environment_names(each)[rank]
    source = StackedGradients(model, identity, SignSum(), names=names, group=dist.group.WORLD)
    source(gradients[own, None], torch.zeros(each[rank], 1))
    expected = [total, -total, total - 2, 2 - total, total // 2 - (total + 1) // 2, total - 1]
    assert model.weight.grad.tolist() == expected


def reads_of_a_step(form: str, rule: Any, megabytes: float = 1e-4) -> dict[str, int]:
    """How often the host reads a value in the third step, which propagates what is not finite."""
    inputs, targets = torch.randn(3, 4, 1), torch.randn(3, 4, 6)
    with as_asynchronous():
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 6))
        if form == "hook":
            wrapped = DistributedDataParallel(model, bucket_cap_mb=megabytes)  # by default several messages
            register_aggregation_hook(wrapped, rule, nonfinite="propagate")

            def step() -> None:
                mse_loss(wrapped(inputs), targets).backward()
        else:
            names = [f"{dist.get_rank()}.{each}" for each in range(3)]
            source = StackedGradients(model, mse_loss, rule, names=names, group=dist.group.WORLD, nonfinite="propagate")

            def step() -> None:
                source(inputs, targets)

        step(), step()
        with Operations() as operations:
            step()
    return dict(operations.reads)


@in_processes(2, form=["hook", "two-level"], rule=["and-mask", "median"])
def test_the_host_waits_for_no_exchange_of_sums_or_columns(form: str, rule: str) -> None:
    assert reads_of_a_step(form, AndMask(0.5) if rule == "and-mask" else Median()) == {}


@in_processes(2)
def test_a_weighting_over_several_messages_reads_inner_products_once_for_all() -> None:
    of_one, of_several = (reads_of_a_step("hook", Clipping(), megabytes) for megabytes in (1.0, 1e-4))
    assert of_several == of_one


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Bytes that this process sends to others, by collective, as ``torch.distributed`` is given them."""
    sent: dict[str, int] = {}
    allowed = ("all_to_all_single", "broadcast", "all_gather")
    refused = ("all_reduce", "all_gather_into_tensor", "all_gather_object", "all_to_all", "reduce", "reduce_scatter")
    originals = {name: getattr(dist, name) for name in (*allowed, *refused)}
    rank, others = dist.get_rank(), dist.get_world_size() - 1

    def all_to_all_single(output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> Any:  # noqa: A002
        sizes = options["input_split_sizes"]
        count("all_to_all_single", (sum(sizes) - sizes[rank]) * input.itemsize)
        return originals["all_to_all_single"](output, input, *arguments, **options)

    def broadcast(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if options["group_src"] == rank:
            count("broadcast", others * tensor.nbytes)
        return originals["broadcast"](tensor, *arguments, **options)

    def all_gather(outputs: list[Tensor], tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        count("all_gather", others * tensor.nbytes)
        return originals["all_gather"](outputs, tensor, *arguments, **options)

    def count(name: str, number: int) -> None:
        sent[name] = sent.get(name, 0) + number

    def unexpected(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective that is not counted")

    for name in originals:
        setattr(dist, name, locals()[name] if name in allowed else unexpected)
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))


def ring_bytes(model: nn.Module) -> float:
    """What one process sends in a ring all-reduce of the gradient; half of it is the first phase."""
    world = dist.get_world_size()
    return 2 * (world - 1) / world * sum(parameter.nbytes for parameter in model.parameters())


@in_processes(2, 4, nonfinite=["raise", "skip"])
def test_hooked_and_mask_sends_what_an_all_reduce_sends(nonfinite: Any) -> None:
    inputs, targets = batches(dist.get_world_size())
    model = ddp(wide(), bucket_cap_mb=0.001)
    buckets: list[int] = []

    def counted(state: AggregationHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.index())
        return aggregation_hook(state, bucket)

    model.register_comm_hook(AggregationHook(AndMask(1.0), nonfinite=nonfinite), counted)
    for _ in range(3):
        buckets.clear()
        with counted_bytes() as sent:
            backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
    assert len(buckets) >= 3
    ring = ring_bytes(model)
    assert sent["all_to_all_single"] > 0.4 * ring, "the counters see what is sent"
    assert sum(sent.values()) <= ring + 300 * len(buckets), (sent, ring, len(buckets))


@in_processes(2, 4)
def test_two_level_and_mask_sends_a_quarter_more_at_first() -> None:
    world = dist.get_world_size()
    counts = [2] * world
    inputs, targets = batches(sum(counts))
    gradients = two_level(wide(), AndMask(1.0), counts)
    for _ in range(2):
        with counted_bytes() as sent:
            of_two_level(gradients, inputs, targets, counts)
    phase = ring_bytes(gradients.model) / 2
    assert phase < sent["all_to_all_single"] <= 1.25 * phase + 300, (sent, phase)
    assert sum(sent.values()) <= 2.25 * phase + 600, (sent, phase)


@pytest.mark.parametrize(
    ("environments", "dtype"),
    [(1, torch.int8), (127, torch.int8), (128, torch.int16), (32_767, torch.int16), (32_768, torch.int32)],
)
def test_counts_of_signs_travel_as_the_smallest_integer_that_holds_them(environments: int, dtype: torch.dtype) -> None:
    assert SIGN.wire_dtype(environments, torch.float32) is dtype
