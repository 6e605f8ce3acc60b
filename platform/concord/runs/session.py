"""The Ray session: connects to a cluster, or starts Ray on this machine."""

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

from concord import logs
from concord.errors import InputError, first_line
from concord.exit_watchdog import ray_agents_ended
from concord.options import option_values
from concord.process_environment import environment_variables
from concord.runs.cluster_address import LOCAL, check_cluster, cluster_address
from concord.runs.termination import signal_handler
from concord.training.options import RunConfig

# How often Ray polls the workers. With Ray's default, 2 s, each checkpoint can delay training as long.
_HEALTH_CHECK_SECONDS = "0.5"
# How long Ray Train waits for a group of workers. After a loss Ray may first request as many as before, while it still
# counts the dead node; its default, 60 s, was most of the cost of a killed node.
_GROUP_SECONDS = "10"
# How long Ray tries to reach a cluster, in seconds; a variable of its environment.
_CONNECTING_SECONDS = "RAY_gcs_server_port_wait_time_s"


@contextlib.contextmanager
def ray_session(config: RunConfig) -> Iterator[str | None]:
    """Connect to the cluster of ``--address`` or RAY_ADDRESS, or start Ray on this machine, while the body runs.

    An existing session is used and kept. Yields the dashboard's address if Ray was started here.
    This process keeps its handler of SIGTERM: Ray's would end it without a message.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _HEALTH_CHECK_SECONDS)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it would show a job's output twice
    if option_values(config).get("min_workers") is not None:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _GROUP_SECONDS)
    import ray

    if ray.is_initialized():
        yield None
        return
    check_cluster(config)
    address, option = cluster_address(config)
    connecting: dict[str, str] = {}
    if address == LOCAL:  # this machine is not preempted, and the watcher itself logs a warning
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    else:  # something answers at the address; one try, of up to a minute, decides whether it is Ray
        connecting = {_CONNECTING_SECONDS: os.environ.get(_CONNECTING_SECONDS, "1")}
    logging.getLogger("ray").setLevel(logging.ERROR)
    structured: dict[str, Any] = (
        {"logging_config": ray.LoggingConfig(encoding="JSON", log_level="ERROR")} if logs.as_json() else {}
    )
    try:
        with signal_handler(signal.SIGTERM), environment_variables(connecting):
            context = ray.init(address=address, logging_level=logging.ERROR, configure_logging=True, **structured)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"{option} {address}: no Ray cluster answers there ({first_line(error)})") from error
    if structured:
        logs.use_json()  # Ray's handlers would write each line twice
        logs.bind_context(job_id=ray.get_runtime_context().get_job_id())
        logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        with ray_agents_ended() if address == LOCAL else contextlib.nullcontext():
            yield f"http://{context.dashboard_url}" if context.dashboard_url else None
    finally:
        ray.shutdown()
