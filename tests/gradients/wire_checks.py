"""The traffic of real workers in a step, counted at ``torch.distributed`` and at TCP, against the model.

``python tests/gradients/wire_checks.py`` prints a table; with ``--json`` it prints the rows for ``test_wire_model.py``.
In its own network namespace the loopback counts only these workers. Without the right to make a namespace, or without
Linux, TCP's bytes are omitted. Gloo's processes meet over a file, so a store's messages are not counted.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation.rules_by_name import AGGREGATORS, aggregator
from concord.gradients import StackedGradients, register_aggregation_hook

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "long"))
from weak_scaling.wire_model import Traffic, all_reduce_traffic, step_traffic

ENVIRONMENTS = (1, 4)
PLAIN = "plain DDP"
HEADERS = 52  # bytes of IPv4 and TCP (with timestamps) before each packet's data
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_INTERFACE_FLAGS, _SET_INTERFACE_FLAGS, _UP = 0x8913, 0x8914, 1


def enter_network_namespace() -> None:
    """Move this process into a new network namespace that has only a loopback.

    Raises:
        OSError: the process has no right to, or the system is not Linux.
    """
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None:
        raise OSError("no network namespaces here")
    if unshare(_CLONE_NEWNET) != 0 and unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace cannot be made")
    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _INTERFACE_FLAGS, request))[1]
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))
    # A process that waits for a core acknowledges late, and TCP would send the data a second time.
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")


def network_counters() -> tuple[int, int, int]:
    """Counters of this network namespace: bytes and packets sent by the loopback, and segments that TCP resent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    sent = next(line for line in lines if line.strip().startswith("lo:")).partition(":")[2].split()[8:10]
    names, values = (
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(sent[0]), int(sent[1]), int(values[names.index("RetransSegs")])


@contextlib.contextmanager
def counted_calls() -> Iterator[dict[str, list[int]]]:
    """The bytes that this process contributes to each collective of ``torch.distributed``, call by call."""
    calls: dict[str, list[int]] = {}
    # The contributed bytes of each collective, by the arguments of the call.
    contributions: dict[str, Callable[..., int]] = {
        "all_to_all_single": lambda output, input, **_: input.nbytes,  # noqa: A006
        "isend": lambda tensor, **_: tensor.nbytes,
    }
    originals = {name: getattr(dist, name) for name in contributions}

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        calls.setdefault(name, []).append(contributions[name](*arguments, **options))
        return originals[name](*arguments, **options)

    for name in originals:
        setattr(dist, name, partial(counted, name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def layer_sizes(model: nn.Module) -> list[int]:
    return [parameter.numel() for parameter in model.parameters()]


def expected(rule: str, sizes: list[int], workers: int, environments: int) -> Traffic:
    """The traffic by the model."""
    if rule == PLAIN:
        return all_reduce_traffic(sizes, workers)
    return step_traffic(aggregator(rule), sizes, workers, environments)


def real_step(rule: str, width: int, environments: int) -> Callable[[], object]:
    """A step by Concord's entry points, or by plain DDP."""
    model = network(width)
    inputs, targets = torch.randn(environments, 4, 6), torch.randn(environments, 4, 3)
    if rule != PLAIN and environments > 1:
        names = [f"{dist.get_rank()}.{index}" for index in range(environments)]
        source = StackedGradients(model, mse_loss, aggregator(rule, 0.5), names=names, group=dist.group.WORLD)
        return lambda: source(inputs, targets)
    wrapped = DistributedDataParallel(model)
    if rule != PLAIN:
        register_aggregation_hook(wrapped, aggregator(rule, 0.5))
    return lambda: mse_loss(wrapped(inputs[0]), targets[0]).backward()


def _worker(
    rank: int, workers: int, cases: list[tuple[str, int, int]], steps: int, folder: Path, meet: Any, report: Connection
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=workers, timeout=timedelta(seconds=120)
    )
    for rule, width, environments in cases:
        step = real_step(rule, width, environments)
        for _ in range(3):  # DDP rebuilds its buckets, and gloo connects
            step()
        meet.wait()  # through memory, so that it sends nothing
        before = network_counters()
        meet.wait()
        with counted_calls() as calls:
            for _ in range(steps):
                step()
        meet.wait()
        size, packets, again = (now - then for now, then in zip(network_counters(), before, strict=True))
        report.send(
            {
                "rule": rule,
                "workers": workers,
                "environments": environments,
                "parameters": sum(layer_sizes(network(width))),
                "calls": sum(map(len, calls.values())) / steps,
                "payload": sum(map(sum, calls.values())) / steps,
                "loopback": size / steps,
                "tcp": (size - HEADERS * packets) / steps,
                "retransmitted": again,
            }
        )
        meet.wait()
    dist.destroy_process_group()


def measured(workers: int, cases: list[tuple[str, int, int]], steps: int) -> list[list[dict[str, Any]]]:
    """The counts of each worker per step, for each case (rule, width, environments of a worker)."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meet = context.Barrier(workers, timeout=120)
        pipes = [context.Pipe(duplex=False) for _ in range(workers)]
        processes = [
            context.Process(
                target=_worker, args=(rank, workers, cases, steps, Path(folder), meet, pipe[1]), daemon=True
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, writer) in zip(processes, pipes, strict=True):
            process.start()
            writer.close()
        try:
            counted = [[reader.recv() for _ in cases] for reader, _ in pipes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return [list(case) for case in zip(*counted, strict=True)]


def rows(workers: int, widths: list[int], steps: int, separate: bool) -> Iterator[dict[str, Any]]:
    """A row for each rule, width and number of environments: modelled and counted numbers per step.

    Args:
        workers: number of processes.
        widths: widths of the networks.
        steps: number of counted steps.
        separate: whether the processes have their own network namespace, so that the loopback counts only them.
    """
    cases = [
        (rule, width, environments)
        for rule in (*AGGREGATORS, PLAIN)
        for width in widths
        for environments in (ENVIRONMENTS if rule != PLAIN else (1,))
    ]
    for (rule, width, environments), counted in zip(cases, measured(workers, cases, steps), strict=True):
        model = expected(rule, layer_sizes(network(width)), workers, environments)
        yield {
            **{name: counted[0][name] for name in ("rule", "workers", "environments", "parameters")},
            "calls": [each["calls"] for each in counted],
            "model_calls": model.calls,
            "payload": [each["payload"] for each in counted],
            "model_payload": model.payload.tolist(),
            "messages": int(model.messages.sum()),
            "model_tcp": int(model.wire.sum()),
            "tcp": counted[0]["tcp"] if separate else None,
            "loopback": counted[0]["loopback"] if separate else None,
            "retransmitted": counted[0]["retransmitted"] / steps,
        }


def show(row: dict[str, Any]) -> None:
    handed = "" if row["rule"] == PLAIN else f"{row['calls'][0]:.0f} calls, {max(row['payload']):.0f} bytes handed over"
    agrees = row["rule"] == PLAIN or (
        row["payload"] == row["model_payload"] and set(row["calls"]) == {row["model_calls"]}
    )
    wire = ""
    if row["tcp"] is not None:
        ratio = row["tcp"] / row["model_tcp"] if row["model_tcp"] else 1.0
        wire = f"TCP {row['tcp']:.0f}, model {row['model_tcp']} ({ratio:.5f}), sent again {row['retransmitted']:.1f}"
    print(
        f"{row['rule']:15} {row['workers']} x {row['environments']}, {row['parameters']} parameters: "
        f"{handed} {'as modelled' if agrees else 'NOT as modelled'}; {wire}",
        flush=True,
    )


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 700])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(words)
    os.environ.pop("LOCAL_SIZE", None)  # with it some builds of gloo use shared memory
    import torch._dynamo  # noqa: F401  the first DDP of a process imports it; imported once here for all

    try:
        enter_network_namespace()
        separate = True
    except OSError as error:
        print(f"TCP is not counted: {error}", file=sys.stderr)
        separate = False
    for workers in options.workers:
        for row in rows(workers, options.widths, options.steps, separate):
            print(json.dumps(row), flush=True) if options.json else show(row)


if __name__ == "__main__":
    main(sys.argv[1:])
