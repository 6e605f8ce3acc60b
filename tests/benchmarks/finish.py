"""Finishing the sums of 6.6 million components in blocks that stay in the cache, against one pass over everything."""

from collections.abc import Iterator

import torch

from concord.aggregation import Aggregator, AndMask, GeometricMean, SandMask, sum_over_environments
from concord.benchmark import Row, interleaved
from concord.gradients.finish import finish_in_blocks
from concord.gradients.layout import Layers
from concord.training.process import tune_process

COMPONENTS, ENVIRONMENTS = 6_600_000, 4
TARGETS: dict[Aggregator, str] = {AndMask(0.8): "≤ 13 ms", GeometricMean(0.8): "≤ 23 ms", SandMask(0.8): "≤ 95 ms"}


def rows() -> Iterator[Row]:
    """A row for each rule, on one core."""
    tune_process(threads=1)
    layers = Layers((COMPONENTS,), (0,))
    for rule, target in TARGETS.items():
        gradients = torch.randn(ENVIRONMENTS, COMPONENTS)
        sums = sum_over_environments(rule, gradients)
        out = torch.empty(COMPONENTS)

        def in_blocks(rule=rule, sums=sums, out=out) -> None:  # type: ignore[no-untyped-def]
            finish_in_blocks(
                rule,
                lambda block: {name: total[block] for name, total in sums.items()},
                out,
                layers,
                0,
                ENVIRONMENTS,
                0,
            )

        def at_once(rule=rule, sums=sums, out=out) -> None:  # type: ignore[no-untyped-def]
            value, kept = rule.finish(sums, ENVIRONMENTS)
            out.copy_(value)
            kept.mean(dtype=torch.float32)

        measured, reference, ratio = interleaved(in_blocks, at_once, repeats=15)
        name = f"{type(rule).__name__}: finish of {COMPONENTS / 1e6:.1f} M components, in blocks"
        yield Row(name, measured, "in one pass", reference, ratio, target)
