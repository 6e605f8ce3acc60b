"""The Ray session: connects to a cluster, or starts Ray on this machine; its resources and its tasks.

Whether a cluster answers at an address is checked within seconds; Ray's own clients try for many minutes.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import torch

from concord import logs
from concord.errors import InputError, RunFailedError, first_line, last_line
from concord.execution import local_ray
from concord.execution.definitions import own_modules
from concord.execution.failures import signal_handler
from concord.execution.ray_messages import kept_apart, lost_nodes_named
from concord.exit_watchdog import ray_agents_ended
from concord.openmp import wait_variables
from concord.options import option_values
from concord.process_environment import environment_variables
from concord.source_file import hidden_module
from concord.training.options import LOCAL, RunConfig

Item = TypeVar("Item")
Found = TypeVar("Found")

_CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 10.0
_USUAL_SECONDS = 20.0  # until Ray is there
_RIGHT = "give HOST:PORT of a Ray head (its port is 6379 by default), auto, or local"
# The first bytes of an HTTP/2 client (Ray speaks gRPC), with an empty frame of settings; a server answers with its own
# frame of settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4  # the fourth byte of such a frame
# How often Ray polls the workers. With Ray's default, 2 s, each checkpoint can delay training as long.
_HEALTH_CHECK_SECONDS = "0.5"
# How long Ray Train waits for a group of workers. After a loss Ray may first request as many as before, while it still
# counts the dead node; its default, 60 s, was most of the cost of a killed node.
_GROUP_SECONDS = "10"
# How long Ray tries to reach a cluster, in seconds; a variable of its environment.
_CONNECTING_SECONDS = "RAY_gcs_server_port_wait_time_s"
# Without it Ray refuses variables that its job was submitted with as well.
_JOB_HAS_VARIABLES_TOO = "RAY_OVERRIDE_JOB_RUNTIME_ENV"

# The default of --wait-for-resources. A cloud starts a node with a GPU in about ten minutes.
_WAIT_MINUTES = 30.0
_CHECK_EVERY_SECONDS = 1.0


@contextlib.contextmanager
def ray_session(config: RunConfig) -> Iterator[str | None]:
    """Connect to the cluster of ``--address`` or RAY_ADDRESS, or start Ray on this machine, while the body runs.

    An existing session is used and kept. Yields the dashboard's address if Ray was started here.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _HEALTH_CHECK_SECONDS)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a job opens files where the command runs, as with one worker
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it would show a job's output twice
    if option_values(config).get("min_workers") is not None:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _GROUP_SECONDS)
    logging.getLogger("ray.widgets").setLevel(logging.ERROR)  # in a notebook it asks for ipywidgets, which is not used
    import ray

    if ray.is_initialized():
        try:
            yield None
        finally:
            local_ray.show_lines(True)
        return
    check_current_folder()
    check_cluster(config)
    address, option = cluster_address(config)
    if address == LOCAL:  # this machine is not preempted, and the watcher itself logs a warning
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    local = address == LOCAL
    with kept_apart():  # also what Ray prints while it disconnects
        try:
            with local_ray.sigterm_blocked() if local else contextlib.nullcontext():
                context = _connect(address, option)
            with ray_agents_ended() if local else lost_nodes_named():
                yield f"http://{context.dashboard_url}" if context.dashboard_url else None
        finally:
            if local:
                local_ray.shutdown()
            else:
                ray.shutdown()


def send_by_value(*values: Any) -> None:
    """Let Ray send the code of these values, a job's or callbacks', with them: no other process can import it."""
    from ray import cloudpickle

    for name in own_modules(*values):
        cloudpickle.register_pickle_by_value(sys.modules[name])


def _connect(address: str, option: str) -> Any:
    """Start Ray (RunFailedError if it does not answer in time) or connect to a cluster (InputError if none answers).

    This process keeps its handler of SIGTERM: Ray's would end it without a message.
    """
    import ray

    level = logging.CRITICAL if address == LOCAL else logging.ERROR  # its exception says why it did not start
    options: dict[str, Any] = {"logging_level": level, "configure_logging": True}
    if logs.as_json():
        options["logging_config"] = ray.LoggingConfig(encoding="JSON", log_level="ERROR")
    if address == LOCAL:
        variables = wait_variables()  # Ray's processes inherit them
    else:  # something answers at the address; one try, of up to a minute, decides whether it is Ray
        seconds = os.environ.get(_CONNECTING_SECONDS, "1")
        variables = {_CONNECTING_SECONDS: seconds, _JOB_HAS_VARIABLES_TOO: "1"}
        options["runtime_env"] = {"env_vars": wait_variables()}
    where = "to start on this machine" if address == LOCAL else f"at {address}"
    try:
        with (
            signal_handler(signal.SIGTERM),
            environment_variables(variables),
            logs.said_after(_USUAL_SECONDS, f"waiting for Ray {where}"),
        ):
            context = ray.init(address=address, **options)
    except SystemExit as error:
        if error.code == signal.SIGTERM:  # Ray's handler took the signal in place of this process's
            signal.raise_signal(signal.SIGTERM)
        raise
    except Exception as error:
        # Ray raises these, and a plain Exception, where its own processes do not answer in time.
        late = type(error) is Exception or isinstance(error, ConnectionError | RuntimeError | TimeoutError)
        if address == LOCAL and late:
            raise RunFailedError(
                f"Ray did not start here ({first_line(error)}): the machine is busy; run the same command again"
            ) from error
        if isinstance(error, ConnectionError | RuntimeError | ValueError):
            raise InputError(f"{option} {address}: no Ray cluster answers there ({first_line(error)})") from error
        if not isinstance(error, OSError):
            raise
        variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
        raise InputError(
            f"{variable}={os.environ.get(variable, '')}: Ray cannot have its files and sockets there "
            f"({error.strerror or first_line(error)}); set RAY_TMPDIR to a folder with a short path, such as /tmp"
        ) from error
    if logs.as_json():
        logs.use_json()  # Ray's handlers would write each line twice
        logs.bind_context(job_id=ray.get_runtime_context().get_job_id())
    logging.getLogger("ray").setLevel(logging.ERROR)
    return context


def check_current_folder() -> None:
    """Refuse a file or package in the current folder that would hide a module from Ray's workers (InputError)."""
    if (hides := hidden_module(Path.cwd())) is not None:
        raise InputError(
            f"{hides[0]}: Ray's workers import from the current folder first, where it hides the module {hides[1]}; "
            "rename it, or start the command in another folder"
        )


def cluster_address(config: RunConfig) -> tuple[str, str]:
    """The address of a run's cluster and the option that gives it; ``local`` starts Ray here."""
    if config.run.address:
        return config.run.address, "--address"
    if address := os.environ.get("RAY_ADDRESS"):
        return address, "--address (from RAY_ADDRESS)"
    return LOCAL, "--address"


def check_cluster(config: RunConfig) -> None:
    """Refuse an address at which no Ray cluster answers (InputError)."""
    address, option = cluster_address(config)
    if address == LOCAL:
        return
    import ray

    if not ray.is_initialized():  # otherwise that session is used
        require_cluster(address, option)


def require_cluster(address: str, option: str) -> None:
    """Refuse the address of an option if no Ray cluster answers there (InputError)."""

    def refuse(why: str, error: Exception | None = None) -> NoReturn:
        raise InputError(f"{option} {address}: {why}; {_RIGHT}") from error

    try:
        host, port = _resolved(address)
    except (ConnectionError, ValueError) as error:
        refuse(first_line(error), error)
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # with TLS Ray itself checks the connection
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(_GREETING)
            answer = connection.recv(9)
    except TimeoutError as error:
        refuse("no Ray cluster answers there (no answer in time)", error)
    except OSError as error:
        refuse(f"no Ray cluster answers there ({error.strerror or first_line(error)})", error)
    if len(answer) < 4 or answer[3] != _SETTINGS:
        refuse("another service answers there, not a Ray cluster")


def _resolved(address: str) -> tuple[str, int]:
    """Host and port to which Ray would connect (ValueError, ConnectionError)."""
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme != "ray":
        raise ValueError(f"a Ray cluster has no {scheme} address")
    if not separator and address != "auto" and not _host_and_port(address)[1]:
        raise ValueError("the address has no port")
    if not separator:
        from ray._private import services  # Ray has no public function for `auto` and its own address of 127.0.0.1

        rest = services.canonicalize_bootstrap_address(address) or address
    host, port = _host_and_port(rest)
    if port is None:
        if not separator:
            raise ConnectionError("none was found on this machine")
        port = 10001  # of Ray's clients
    return host, port


def _host_and_port(address: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port


def require_resources(config: RunConfig, info: Callable[[str], None]) -> None:
    """Wait until the cluster has a run's resources (InputError in the end): Ray would wait silently for ever."""
    bundles = [{kind: 1.0} for kind, (needed, _) in _requests(config).items() for _ in range(math.ceil(needed))]
    wait_for_resources(lambda: check_resources(config), bundles, config, info)


def check_resources(config: RunConfig) -> None:
    """Refuse a run that needs more than the connected cluster has (InputError)."""
    import ray

    available = ray.cluster_resources()
    for kind, (needed, words) in _requests(config).items():
        if needed > available.get(kind, 0.0):
            raise InputError(f"{words}; the Ray cluster has {available.get(kind, 0.0):g}")


def check_gpus(config: RunConfig) -> None:
    """Refuse GPUs (InputError) that the Ray session lacks, or this machine if Ray would start here."""
    if config.gpu_request()[0] == 0:
        return
    import ray

    if not ray.is_initialized():
        if not config.run.on_cluster:
            check_local_gpus(config)
    elif waiting_minutes(config) == 0:
        check_resources(config)


def check_local_gpus(config: RunConfig) -> None:
    """Refuse GPUs that this machine does not have (InputError)."""
    needed, words = config.gpu_request()
    if needed > (found := torch.cuda.device_count()):
        raise InputError(f"{words}; this machine has {found}")


def _requests(config: RunConfig) -> dict[str, tuple[float, str]]:
    return {"GPU": config.gpu_request(), "CPU": config.cpu_request()}


def wait_for_resources(
    check: Callable[[], Found], bundles: Sequence[dict[str, float]], config: RunConfig, info: Callable[[str], None]
) -> Found:
    """Ask the autoscaler for resources until the check passes, and return its result; the request ends with the wait.

    ``check`` raises InputError while the cluster lacks something; after ``--wait-for-resources`` it is raised here. The
    cluster must have all ``bundles`` at the same time, each on one node.
    """
    minutes = waiting_minutes(config)
    try:
        return check()
    except InputError as lacking:
        if minutes == 0:
            raise
        info(f"{lacking}; its autoscaler is asked for more, for up to {minutes:g} minutes (--wait-for-resources)")
    from ray.autoscaler.sdk import request_resources

    end = time.monotonic() + 60 * minutes
    try:
        while True:
            request_resources(bundles=list(bundles))  # again each time: another run's request replaces this one
            try:
                return check()
            except InputError as lacking:
                if time.monotonic() >= end:
                    raise InputError(f"{lacking}, after {minutes:g} minutes") from None
            time.sleep(_CHECK_EVERY_SECONDS)
    finally:
        # End the request, so that the cluster may shrink again. The run's processes keep their nodes.
        request_resources(bundles=[])


def waiting_minutes(config: RunConfig) -> float:
    """How long a run waits for resources; a Ray that is started on this machine never gets new ones."""
    if config.run.wait_for_resources is not None:
        return config.run.wait_for_resources
    return _WAIT_MINUTES if config.run.on_cluster else 0.0


def task_results(
    task: Any, items: Iterable[Item], arguments: Callable[[Item], Sequence[Any]], most: int | None = None
) -> Generator[tuple[Item, Any], None, None]:
    """Run a Ray task on each item, at most this number at a time; yield each result, or the RayError, as it comes."""
    import ray

    waiting = list(items)
    most = len(waiting) if most is None else most
    running: dict[Any, Item] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                item = waiting.pop(0)
                running[task.remote(*arguments(item))] = item
            (ready,), _ = ray.wait(list(running), num_returns=1)
            item = running.pop(ready)
            try:
                result = ray.get(ready)
            except ray.exceptions.RayError as error:
                result = error
            yield item, result
    finally:
        for each in running:
            ray.cancel(each, force=True)


def task_failure(error: Exception) -> str:
    """Why a Ray task failed, in one line."""
    return last_line(getattr(error, "cause", None) or error)
