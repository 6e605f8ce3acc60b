"""A step's exchange by 1, 2, 4 and 8 local gloo workers against the cost model, fitted to part of the measurements.

Only the exchange is timed, no backward pass. The fit sees 1, 2 and 8 workers and three of the four sizes; the rows have
the rest: 4 workers, and the fourth size. The rows' reference has the fitted cost, in the form of ``COST`` in
``weak_scaling/tables.py``. Workers that share a core take turns: in the model their time is multiplied by the number of
workers for each core.

``python tests/benchmarks/long/scaling.py docs`` measures nothing: it writes the tables and the figure of
docs/scaling.md, which the model computes.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from weak_scaling import tables
from weak_scaling.wire_model import Traffic, exchange_traffic, fitted_cost, report_traffic

from concord.aggregation import aggregator, sum_over_environments
from concord.benchmark import Row, in_gloo_group
from concord.gradients.exchange import Processes, SliceExchange, complete
from concord.gradients.layout import Layers
from concord.gradients.step import Aggregation

WORKERS = (1, 2, 4, 8)
COMPONENTS = (10_000, 100_000, 1_000_000, 5_000_000)
HELD_OUT_WORKERS, HELD_OUT_COMPONENTS = 4, 100_000
ROUNDS, REPEATS, WARMUP = 3, 5, 1

Case = tuple[str, int, int]
"""What is measured: rule, environments a worker, components."""
RULES: tuple[tuple[str, int], ...] = (("mean", 1), ("and-mask", 1), ("and-mask", 4))
CASES: tuple[Case, ...] = tuple((*rule, components) for rule in RULES for components in COMPONENTS)


def _step(case: Case) -> Callable[[], object]:
    name, environments, components = case
    gradients, out = torch.randn(1, components), torch.empty(components)
    rule, several = aggregator(name, 0.5), environments > 1
    processes = Processes.of([str(index) for index in range(environments)], None)
    layers = Layers((components,), (0,))
    exchange = SliceExchange(
        Aggregation(rule), layers, torch.float32, gradients.device, processes, sends_statistics=several
    )
    sums = sum_over_environments(rule, gradients) if several else {"gradient": gradients[0]}

    def step() -> None:
        exchange.send(sums, torch.ones(environments))
        exchange.apply_rule(out, 0)
        complete([exchange], 0)

    return step


def _measure() -> list[list[float]]:
    steps = [_step(case) for case in CASES]
    seconds: list[list[float]] = [[] for _ in CASES]
    # In turn, so that other load on the machine affects all cases equally.
    for _ in range(WARMUP + REPEATS):
        for step, times in zip(steps, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times.append(time.perf_counter() - start)
    return [times[WARMUP:] for times in seconds]


def _traffic(case: Case, workers: int) -> Traffic:
    name, environments, components = case
    several = environments > 1
    exchange = exchange_traffic(
        aggregator(name), [components], workers, environments, torch.float32, sends_statistics=several
    )
    return exchange + report_traffic([[components]], workers, environments)


def rows() -> list[Row]:
    """A row for each measurement that the fit did not see."""
    times: dict[tuple[Case, int], list[float]] = {(case, workers): [] for workers in WORKERS for case in CASES}
    for _ in range(ROUNDS):  # other load on the machine changes within minutes
        for workers in WORKERS:
            for case, seconds_of_round in zip(CASES, in_gloo_group(_measure, workers), strict=True):
                times[case, workers] += seconds_of_round
    measured = {point: statistics.median(each) for point, each in times.items()}
    held_out = [
        (case, workers) for case, workers in measured if workers == HELD_OUT_WORKERS or case[-1] == HELD_OUT_COMPONENTS
    ]
    seen = [point for point in measured if point not in held_out]
    cores = os.cpu_count() or 1
    cost = fitted_cost([_traffic(*point) for point in seen], [measured[point] for point in seen], cores)
    result = []
    for case, workers in held_out:
        (rule, environments, components), seconds = case, measured[case, workers]
        modelled = cost.seconds(_traffic(case, workers), cores)
        name = f"exchange, {rule}, {workers} x {environments} environments, {components / 1e6:g} M components"
        found = f"the model, cost {' '.join(f'{part:.2e}' for part in cost)}"
        result.append(Row(name, seconds, found, modelled, seconds / modelled, "1"))
    return result


if __name__ == "__main__":
    tables.write(Path(sys.argv[1]))
