"""Many short runs of one job in this process, without Ray: for figures that need dozens of them."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import concord
from concord.training.config import PLACEMENT_OPTIONS, TrainConfig
from concord.training.job import Job
from concord.training.loop import Place, Silent, train
from concord.training.process import tune_process

Key = TypeVar("Key", int, str, float)


def sweep(
    job: Job[Any],
    configurations: Mapping[Key, Sequence[TrainConfig]],
    metric: str,
    record: Path,
    say: Callable[[str], None],
    place: Place | None = None,
) -> dict[Key, list[float]]:
    """Train every configuration and give the metric of each, by key, in order.

    Finished runs are kept in ``record`` (a JSON line each) and not run again, so a sweep that was stopped goes on.
    """
    tune_process()
    record.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if record.exists():
        for line in record.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError):  # the last line of a sweep that was killed
                entry = json.loads(line)
                done[entry["configuration"]] = entry["metrics"]
    total, finished = sum(map(len, configurations.values())), 0
    results: dict[Key, list[float]] = {}
    for key, configs in configurations.items():
        results[key] = []
        for config in configs:
            config.check()
            science = {name: value for name, value in vars(config).items() if name not in PLACEMENT_OPTIONS}
            data = job.environments(config).version
            science |= {"data": data} if data is not None else {}
            identity = json.dumps({"version": concord.__version__, **science}, default=str, sort_keys=True)
            if identity not in done:
                outcome = train(job, config, place or Place(), Silent())
                done[identity] = {name: value for name, value in outcome.metrics.items() if "/" not in name}
                with record.open("a") as lines:
                    lines.write(json.dumps({"configuration": identity, "metrics": done[identity]}) + "\n")
            finished += 1
            results[key].append(done[identity][metric])
            value = results[key][-1]
            say(f"{finished} of {total}: {config.method}, {key}, seed {config.seed}: {metric} {value:.3f}")
    return results
