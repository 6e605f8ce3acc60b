"""The command that works out what a step would send with any number of workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from concord.cli.output import table
from concord.cli.parsing import parse
from concord.errors import InputError

if TYPE_CHECKING:
    from concord.analysis.scaling_figures import ScalingCurve

_NETWORKS = ("synthetic-mlp", "fast-resnet", "resnet-18")
_TITLES = {"synthetic-mlp": "the synthetic task's MLP", "fast-resnet": "FastResNet", "resnet-18": "ResNet-18"}


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Bytes and messages of a step against workers, worked out for gloo; nothing is trained."""

    aggregator: str = "and-mask"
    """The rule: mean, and-mask, geometric-mean, xor-mask, sand-mask or t-mask."""
    networks: tuple[str, ...] = _NETWORKS
    """Any of synthetic-mlp, fast-resnet and resnet-18, or numbers of parameters."""
    workers: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """Numbers of workers."""
    environments: tuple[int, ...] = (1, 4, 32)
    """Numbers of environments of each worker."""
    cost: tuple[float, ...] = ()
    """Seconds for a call, a message, a byte and a number, as `concord bench --only scaling` finds them."""
    figure: Path | None = None
    """Where to draw it, a PNG."""

    def check(self) -> None:
        """Refuse what cannot be worked out.

        Raises:
            InputError: the option, the value, and what would be right.
        """
        for option in ("workers", "environments"):
            values = getattr(self, option)
            if not values or min(values) < 1:
                raise InputError(f"--{option} {' '.join(map(str, values))}: must be at least 1, each")
        if not self.networks:
            raise InputError(f"--networks: needs a value, any of {', '.join(_NETWORKS)}, or a number of parameters")
        if self.cost and not (len(self.cost) == 4 and min(self.cost) >= 0):
            given = " ".join(f"{part:g}" for part in self.cost)
            raise InputError(f"--cost {given}: must be the seconds of a call, a message, a byte and a number")
        if self.figure is not None and self.figure.suffix != ".png":
            raise InputError(f"--figure {self.figure}: must end in .png")


def scaling(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """What a step sends against workers."""
    options = parse(Scaling, words, "concord scaling")
    options.check()
    from concord.aggregation.selection import aggregator
    from concord.analysis.wire_model import StepCost, all_reduce_traffic, ring_bytes, step_traffic

    layers = {name: _layer_sizes(name) for name in options.networks}
    rule = aggregator(cast(Any, options.aggregator))  # which refuses a name that is none
    cost = StepCost(*options.cost) if options.cost else None
    rows = []
    for network, sizes in layers.items():
        for workers in sorted(set(options.workers)):
            plain = all_reduce_traffic(sizes, workers)
            for environments in sorted(set(options.environments)):
                step = step_traffic(rule, sizes, workers, environments)
                rows.append(
                    {
                        "network": network,
                        "parameters": sum(sizes),
                        "workers": workers,
                        "environments": environments,
                        "calls": step.calls,
                        "payload_bytes": int(step.payload.max()),
                        "sent_bytes": float(step.sent.mean()),
                        "wire_bytes": float(step.wire.mean()),
                        "messages": float(step.messages.mean()),
                        "ring_bytes": ring_bytes(4 * sum(sizes), workers),
                        "plain_calls": plain.calls,
                        "plain_wire_bytes": float(plain.wire.mean()),
                        "plain_messages": float(plain.messages.mean()),
                        "seconds": cost.seconds(step) if cost else None,
                    }
                )
    if options.figure is not None:
        from concord.analysis.figures import save
        from concord.analysis.scaling_figures import scaling_figure

        save(scaling_figure(_curves(rows), options.aggregator), options.figure)
    if not as_json:
        for network in layers:
            for environments in sorted(set(options.environments)):
                _print([row for row in rows if (row["network"], row["environments"]) == (network, environments)])
        if options.figure is not None:
            print(f"figure    {options.figure}")
    return {"aggregator": options.aggregator, "rows": rows, "figure": str(options.figure) if options.figure else None}


def _layer_sizes(network: str) -> list[int]:
    """Components of each parameter tensor; a bare number of parameters is one tensor."""
    import torch

    from concord.models import MLP, FastResNet, ResNet18

    if network.isdecimal() and int(network) > 0:
        return [int(network)]
    with torch.device("meta"):
        match network:
            case "synthetic-mlp":  # the synthetic job's: 2 dimensions of the spirals, 32 of the shortcuts
                model: torch.nn.Module = MLP(34, 2)
            case "fast-resnet":
                model = FastResNet()
            case "resnet-18":
                model = ResNet18()
            case _:
                raise InputError(f"--networks {network}: must be {', '.join(_NETWORKS)}, or a number of parameters")
    return [parameter.numel() for parameter in model.parameters()]


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    """One network with so many environments a worker: a line for each number of workers."""
    header = ["workers", "calls", "handed over", "sent", "to TCP", "messages", "plain DDP: to TCP", "messages", "ratio"]
    lines = []
    for row in rows:
        sizes = (row[name] for name in ("payload_bytes", "sent_bytes", "wire_bytes"))
        line = [str(row["workers"]), str(row["calls"]), *(_mb(size) for size in sizes), f"{row['messages']:.0f}"]
        line += [_mb(row["plain_wire_bytes"]), f"{row['plain_messages']:.0f}"]
        line += [f"{row['wire_bytes'] / row['plain_wire_bytes']:.3f}" if row["plain_wire_bytes"] else ""]
        lines.append(line + ([f"{row['seconds']:.3g}"] if row["seconds"] is not None else []))
    environments = f"{rows[0]['environments']} environment{'s' if rows[0]['environments'] > 1 else ''} a worker"
    print(f"{rows[0]['network']}, {rows[0]['parameters']} parameters, {environments}: of a worker, in a step")
    table(header + (["seconds"] if rows[0]["seconds"] is not None else []), lines)


def _mb(number: float) -> str:
    return f"{number / 1e6:.3f} MB"


def _curves(rows: Sequence[Mapping[str, Any]]) -> "list[ScalingCurve]":
    from concord.analysis.scaling_figures import ScalingCurve

    result = []
    for network, environments in dict.fromkeys((row["network"], row["environments"]) for row in rows):
        own = [row for row in rows if (row["network"], row["environments"]) == (network, environments)]
        size = f"{own[0]['parameters'] / 1e6:.2f} million parameters"
        result.append(
            ScalingCurve(
                network=f"{_TITLES[network]}, {size}" if network in _TITLES else size,
                environments=environments,
                workers=[row["workers"] for row in own],
                wire=[row["wire_bytes"] for row in own],
                plain_wire=[row["plain_wire_bytes"] for row in own],
                messages=[row["messages"] for row in own],
                seconds=[row["seconds"] for row in own if row["seconds"] is not None],
            )
        )
    return result
