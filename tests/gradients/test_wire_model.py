"""The model of the exchange against the traffic of real workers."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import run_group, run_processes, run_program
from torch.nn.parallel import DistributedDataParallel
from weak_scaling.tables import with_tables
from weak_scaling.wire_model import (
    StepCost,
    all_reduce_traffic,
    buckets,
    exchange_traffic,
    fitted_cost,
    report_traffic,
    ring_bytes,
    step_traffic,
)
from wire_checks import ENVIRONMENTS, PLAIN, counted_calls

from concord.aggregation import sum_over_environments
from concord.aggregation.rules_by_name import AGGREGATORS, aggregator
from concord.gradients.exchange import Processes, SliceExchange, complete, sent_dtypes
from concord.gradients.layout import Layers
from concord.gradients.step import Aggregation
from concord.models import MLP, FastResNet, ResNet18

Row = dict[str, Any]


def counted(*words: str) -> list[Row]:
    """The rows of ``wire_checks.py``."""
    with TemporaryDirectory() as folder:
        printed = run_program(f"import wire_checks\nwire_checks.main({['--json', *words]})", Path(folder))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Every rule and plain DDP, two sizes, 1, 2 and 4 workers, 1 and 4 environments each."""
    return counted("--workers", "1", "2", "4", "--widths", "7", "300", "--steps", "2")


def assert_handed_over(rows: list[Row]) -> None:
    exchanged = [row for row in rows if row["rule"] != PLAIN]
    assert {row["rule"] for row in exchanged} == set(AGGREGATORS)
    assert {row["environments"] for row in exchanged} == set(ENVIRONMENTS)
    for row in exchanged:
        assert row["payload"] == row["model_payload"], row
        assert row["calls"] == [row["model_calls"]] * row["workers"], row


def assert_on_the_wire(rows: list[Row]) -> None:
    if rows[0]["tcp"] is None:
        pytest.skip("a network namespace cannot be made here")
    for row in rows:
        # What the TCP of a process that waits for its core sends again is counted again: a packet holds 64 KiB at most.
        again = 66_000 * row["retransmitted"]
        assert row["model_tcp"] <= row["tcp"] <= row["model_tcp"] + again, row
    assert any(row["model_tcp"] > 0 and row["retransmitted"] == 0 for row in rows), "some rows are exact"


def test_the_payload_is_what_torch_distributed_is_given(rows: list[Row]) -> None:
    assert len(rows) == 3 * 2 * (2 * len(AGGREGATORS) + 1)
    assert_handed_over(rows)


def test_the_wire_carries_the_modelled_bytes_and_none_beside_them(rows: list[Row]) -> None:
    assert_on_the_wire(rows)


@pytest.mark.slow
def test_eight_workers_send_the_modelled_bytes() -> None:
    rows = counted("--workers", "8")
    assert_handed_over(rows)
    assert_on_the_wire(rows)


@pytest.mark.parametrize(("environments", "itemsize"), [(32, 1), (127, 1), (128, 2), (32_767, 2), (32_768, 4)])
def test_the_width_of_counts_depends_on_a_workers_environments_alone(environments: int, itemsize: int) -> None:
    """Every worker's count of signs travels by itself, so its integer need not hold the sum over workers."""
    dtypes = sent_dtypes(aggregator("and-mask"), torch.float32, environments, sends_statistics=True)
    assert {name: dtype.itemsize for name, dtype in dtypes.items()} == {"gradient": 4, "sign": itemsize}


def of_many_workers(_: int, workers: int, rank: int) -> None:
    # More workers than any machine has room for: the exchange's own code, over PyTorch's transport that sends nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=workers, store=FakeStore())
    sizes = [700, 30, 5000, 8]
    for name in AGGREGATORS:
        for environments in (1, 4, 32):
            rule, several = aggregator(name), environments > 1
            names = tuple(tuple(f"{other}.{index}" for index in range(environments)) for other in range(workers))
            exchange = SliceExchange(
                Aggregation(rule),
                Layers(tuple(sizes), (0, 700, 730, 5730)),
                torch.float32,
                torch.device("cpu"),
                Processes(None, names, rank),
                sends_statistics=several,
            )
            gradients = torch.ones(environments, sum(sizes))
            statistics = sum_over_environments(rule, gradients) if several else {"gradient": gradients[0]}
            with counted_calls() as calls:
                exchange.send(statistics, torch.ones(environments))
                exchange.apply_rule(torch.empty(sum(sizes)), 0)
                complete([exchange], 0)
            model = exchange_traffic(rule, sizes, workers, environments, torch.float32, sends_statistics=several)
            model += report_traffic([sizes], workers, environments)
            assert sum(map(len, calls.values())) == model.calls
            assert sum(map(sum, calls.values())) == model.payload[rank]


@pytest.mark.parametrize(("workers", "rank"), [(64, 0), (64, 5), (1024, 1023)])
def test_up_to_1024_workers_hand_over_what_is_modelled(workers: int, rank: int) -> None:
    run_processes(of_many_workers, 1, workers, rank)


def of_real_buckets(rank: int, world_size: int) -> None:
    for model, inputs in (
        (MLP(34, 2), torch.randn(2, 34)),
        (MLP(34, 2, hidden_units=1000), torch.randn(2, 34)),
        (FastResNet(), torch.rand(2, 3, 8, 8)),
        (ResNet18(), torch.rand(2, 3, 32, 32)),
    ):
        seen: list[int] = []

        def hook(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append(bucket.buffer().numel())
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(seen, hook)
        for _ in range(2):  # DDP lays its buckets out anew after the first
            seen.clear()
            wrapped(inputs).sum().backward()
        assert seen == [sum(bucket) for bucket in buckets([each.numel() for each in model.parameters()])]


def test_buckets_are_those_of_ddp(tmp_path: Path) -> None:
    run_group(of_real_buckets, 1, tmp_path)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 64])
def test_whatever_is_sent_arrives_and_no_worker_sends_more_than_its_share(workers: int) -> None:
    sizes = [1_000_003, 17]
    gradient = 4 * sum(sizes)
    reduced = all_reduce_traffic(sizes, workers)
    assert reduced.sent.sum() == 2 * (workers - 1) * gradient
    assert abs(reduced.sent - ring_bytes(gradient, workers)).max() <= 8 * workers
    hooked = step_traffic(aggregator("and-mask"), sizes, workers, 1)
    reports = report_traffic(buckets(sizes), workers, 1).sent
    moved = (hooked.sent - reports).sum()
    assert moved == reduced.sent.sum(), "slices and updates move what an all-reduce moves"


def test_a_fit_finds_the_cost_that_made_the_times() -> None:
    cost = StepCost(call=2e-4, message=3e-5, byte=4e-10, number=2e-9)
    steps = [
        step_traffic(aggregator(rule), [components], workers, environments)
        for rule in ("mean", "sand-mask")
        for components in (1_000, 1_000_000)
        for workers in (1, 2, 8)
        for environments in (1, 4)
    ]
    seconds = [cost.seconds(step, cores=2) for step in steps]
    np.testing.assert_allclose(fitted_cost(steps, seconds, cores=2), cost, rtol=1e-3)
    assert cost.seconds(steps[-1], cores=2) == pytest.approx(4 * cost.seconds(steps[-1])), "8 workers on 2 cores"


def test_the_documents_tables_are_what_the_command_writes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    assert page.count("| 1024 |") == 3
    assert with_tables(page) == page
