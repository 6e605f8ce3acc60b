"""MLflow's system metrics of a training process: CPU, memory, disk, network and GPUs, for the page *System metrics*.

MLflow's own monitor writes to a store from every process. Here each process gives its samples to the run's record, of
which MLflow is the mirror.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from concord.errors import InputError
from concord.tracking.client import import_mlflow

_USUAL_SECONDS = 10.0  # MLflow's
ENABLED, INTERVAL = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
_logger = logging.getLogger("concord.tracking")


def sampling_seconds() -> float | None:
    """The seconds between two samples that MLflow's environment variables ask for; None for no samples.

    Raises InputError for an interval that is no number above 0.
    """
    if os.environ.get(ENABLED, "").lower() not in ("true", "1"):
        return None
    given = os.environ.get(INTERVAL) or str(_USUAL_SECONDS)
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"{INTERVAL} {given}: must be a number of seconds above 0")
    return seconds


@contextmanager
def sampled(seconds: float, worker: int, send: Callable[[dict[str, float], int], None]) -> Iterator[None]:
    """Sample this process's machine while the body runs, and at its end.

    ``send`` takes the metrics, named after the worker, and the sample's number, in another thread.
    """
    import_mlflow()
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except Exception:  # it has no GPU, or NVIDIA's library is missing
        _logger.debug("no GPU is monitored")
    over = threading.Event()

    def sample() -> None:
        number, ends = 0, False
        while not ends:
            ends = over.wait(seconds)
            found: dict[str, float] = {}
            try:
                for monitor in monitors:
                    monitor.collect_metrics()
                    found |= monitor.aggregate_metrics()
                    monitor.clear_metrics()
                send({f"system/worker-{worker}/{name}": float(value) for name, value in found.items()}, number)
            except Exception as error:  # monitoring must not disturb the run
                _logger.warning("system metrics stopped: %s: %s", type(error).__name__, error)
                return
            number += 1

    thread = threading.Thread(target=sample, name="concord-system-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)
