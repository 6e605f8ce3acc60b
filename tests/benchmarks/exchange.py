"""Ways for 4 gloo processes to aggregate 6.5 million components with the AND-mask, against a plain all-reduce."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from concord.aggregation import AndMask, sum_over_environments
from concord.benchmark import Row, in_gloo_group, interleaved
from concord.gradients.exchange import Processes, SliceExchange, complete
from concord.gradients.layout import Layers
from concord.gradients.step import Aggregation

PROCESSES, COMPONENTS, BLOCK = 4, 6_500_000, 1 << 16
CANDIDATES = (
    "all-reduce of gradients, all-reduce of signs as int8",
    "all-to-all, rule on a whole slice, all-gather",
    "all-to-all, rule on blocks of a slice, all-gather",
    "all-to-all, rule on blocks of a slice, a broadcast of each slice",
    "as the gradient sources do it: slices and reports sent to everybody",
)


def _measure() -> list[Any]:
    rule, width, rank = AndMask(0.8), COMPONENTS // PROCESSES, dist.get_rank()
    gradient, out, got = torch.randn(COMPONENTS), torch.empty(COMPONENTS), torch.empty(PROCESSES, width)
    slices = list(out.split(width))

    def finish(block_width: int) -> Tensor:
        dist.all_to_all_single(got.view(-1), gradient)
        for start in range(0, width, block_width):
            block = slice(start, start + block_width)
            slices[rank][block] = rule.finish(sum_over_environments(rule, got[:, block]), PROCESSES).value
        own: Tensor = slices[rank]
        return own

    def two_all_reduces() -> None:
        total, signs = gradient.clone(), gradient.sign().to(torch.int8)
        dist.all_reduce(total)
        dist.all_reduce(signs)
        rule.finish({"gradient": total, "sign": signs.float()}, PROCESSES)

    def with_all_gather(block_width: int) -> None:
        dist.all_gather(slices, finish(block_width).clone())

    def with_broadcasts() -> None:
        finish(BLOCK)
        works = [dist.broadcast(part, source, async_op=True) for source, part in enumerate(slices)]
        for work in works:
            work.wait()

    layers = Layers((COMPONENTS,), (0,))
    processes = Processes.of([f"environment {rank}"], None)
    exchange = SliceExchange(Aggregation(rule), layers, torch.float32, out.device, processes, sends_statistics=False)

    def as_in_sources() -> None:
        exchange.send({"gradient": gradient}, torch.ones(1))
        exchange.apply_rule(out, step=0)
        complete([exchange], step=0)

    functions = (
        two_all_reduces,
        lambda: with_all_gather(width),
        lambda: with_all_gather(BLOCK),
        with_broadcasts,
        as_in_sources,
    )
    plain = torch.randn(COMPONENTS)
    return [
        interleaved(function, lambda: dist.all_reduce(plain), repeats=12, synchronize=dist.barrier)
        for function in functions
    ]


def rows() -> list[Row]:
    """A row for each way."""
    return [
        Row(name, seconds, "plain all-reduce", reference, ratio, "≤ 1.35 for the last, which is used")
        for name, (seconds, reference, ratio) in zip(CANDIDATES, in_gloo_group(_measure, PROCESSES), strict=True)
    ]
