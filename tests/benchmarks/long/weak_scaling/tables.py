"""The tables and the figure of docs/scaling.md, computed by the wire model."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from weak_scaling.figure import ScalingCurve, scaling_figure
from weak_scaling.wire_model import StepCost, Traffic, all_reduce_traffic, buckets, ring_bytes, step_traffic

from concord.aggregation.rules_by_name import aggregator
from concord.analysis.figures import save
from concord.models import MLP, FastResNet, ResNet18

RULE = "and-mask"
WORKERS = tuple(2**power for power in range(11))
ENVIRONMENTS = (1, 4, 32)
# Seconds of a call, a message, a byte and a number, fitted by `concord bench --only scaling`.
COST = StepCost(2.15e-4, 2.11e-4, 1.86e-9, 2.20e-9)
_TABLES = re.compile(r"(?<=<!-- tables -->\n).*?(?=<!-- end of tables -->)", re.DOTALL)
_COLUMNS = (
    *("workers", "ring", "plain DDP", *(f"d = {count}" for count in ENVIRONMENTS)),
    *("messages: plain DDP", "d = 1", "d > 1", "calls: plain DDP", "d = 1", "d > 1"),
)


@dataclass(frozen=True)
class Network:
    """A network of the tables: the sizes of its parameter tensors, and the number of decimals of its megabytes."""

    name: str
    layer_sizes: list[int]
    digits: int

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(self.layer_sizes)


def networks() -> list[Network]:
    """The networks of the tables."""
    with torch.device("meta"):
        models = {  # the synthetic job's MLP: 2 dimensions of the spirals, 32 of the shortcuts
            "the synthetic task's MLP": MLP(34, 2),
            "FastResNet": FastResNet(),
            "ResNet-18": ResNet18(),
        }
    return [
        Network(name, [parameter.numel() for parameter in model.parameters()], 3 if name.startswith("the") else 2)
        for name, model in models.items()
    ]


def write(docs: Path) -> None:
    """Write the tables into ``docs/scaling.md``, and the figure beside it."""
    page = docs / "scaling.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    save(scaling_figure(list(_curves()), RULE), docs / "figures" / "weak-scaling.png")


def with_tables(page: str) -> str:
    """The page with recomputed tables."""
    return _TABLES.sub(lambda _: "\n" + "\n".join(map(_table, networks())) + "\n", page)


def _table(network: Network) -> str:
    count = len(buckets(network.layer_sizes))
    title = network.name[0].upper() + network.name[1:]
    lines = [f"{title}, {network.parameters:,} parameters, {count} bucket{'s' if count > 1 else ''}:", ""]
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_cells(network, workers) for workers in WORKERS)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |".replace(" --- ", "---") for row in rows), ""])


def _cells(network: Network, workers: int) -> Iterable[str]:
    plain = all_reduce_traffic(network.layer_sizes, workers)
    one, *several = steps = [_step(network, workers, count) for count in ENVIRONMENTS]
    sizes = [ring_bytes(4 * network.parameters, workers), *(step.wire.mean() for step in (plain, *steps))]
    return (
        str(workers),
        *(f"{size / 1e6:.{network.digits}f}" for size in sizes),
        *(f"{step.messages.mean():,.0f}" for step in (plain, one, several[0])),
        *(f"{step.calls:,}" for step in (plain, one, several[0])),
    )


def _step(network: Network, workers: int, environments: int) -> Traffic:
    return step_traffic(aggregator(RULE), network.layer_sizes, workers, environments)


def _curves() -> Iterator[ScalingCurve]:
    for network in networks():
        plain = [all_reduce_traffic(network.layer_sizes, workers) for workers in WORKERS]
        for environments in ENVIRONMENTS:
            steps = [_step(network, workers, environments) for workers in WORKERS]
            yield ScalingCurve(
                network=f"{network.name}, {network.parameters / 1e6:.2f} million parameters",
                environments=environments,
                workers=WORKERS,
                wire=[float(step.wire.mean()) for step in steps],
                plain_wire=[float(step.wire.mean()) for step in plain],
                messages=[float(step.messages.mean()) for step in steps],
                seconds=[COST.seconds(step) for step in steps],
            )
