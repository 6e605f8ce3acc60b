"""The training loop on Ray Train: workers that own their environments, replaced when they die."""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from concord import logs
from concord.aggregation.rule_file import RuleFile
from concord.environments.summary import PURPOSES, DataSummary
from concord.errors import InputError, RunFailedError, to_be_sent
from concord.gradients import NonFiniteGradientError
from concord.process_environment import environment_variables
from concord.storage import (
    Folder,
    FullDiskError,
    TakenOverError,
    access,
    full_disk,
    full_disk_in_one_line,
    granted,
    require_space,
)
from concord.tracking import MetricLog, redact
from concord.tracking.journal import entries
from concord.training.cluster_address import LOCAL, check_cluster, cluster_address
from concord.training.config import RunConfig, TrainConfig
from concord.training.job import JobFile, job_from_source
from concord.training.live_metrics import RUN_METRICS, Published, RunSamples, StepsSoFar
from concord.training.loop import Place, Prepared, prepare, train
from concord.training.outcome import Evaluation, Outcome
from concord.training.process import tune_process
from concord.training.ray_agents import ended_with_driver
from concord.training.run_folder import missing_run

_logger = logging.getLogger("concord.training")

# The journal of a run's metrics, in the run's folder.
METRICS = "metrics.jsonl"
# Ray Train's folder of checkpoints there, and its list of them.
_CHECKPOINTS, _SNAPSHOT = "checkpoints", "checkpoint_manager_snapshot.json"
# What a checkpoint notes: how long the journal was when it was made.
_JOURNAL_LENGTH = "concord_journal_length"
# What went wrong in a worker, there too, if it was a mistake and no outage.
ERROR = "error.txt"
# How long the first worker, at its end, goes on trying to send metrics that a store did not take.
_LAST_METRICS_SECONDS = 20.0
# The same where a disk is full, which may be the store's as well.
_FULL_DISK_METRICS_SECONDS = 2.0
# Ray looks at the workers this often. Its own 2 s is also how long each checkpoint can hold training up.
_HEALTH_CHECK_SECONDS = "0.5"
# Of a run with a range of workers: how often it is looked whether there is room for more. To take them in costs what
# was done since the last checkpoint.
_RESIZE_SECONDS = 30.0
# Of such a run too: how long a group of workers is waited for. Ray may ask for as many as before the loss while it
# still counts the node that died, and then goes by the new count; its own 60 s were most of what a killed node cost.
_GROUP_SECONDS = "10"
# How long Ray tries to reach a cluster, in seconds; a variable of its environment.
_CONNECTING_SECONDS = "RAY_gcs_server_port_wait_time_s"
# How long workers that are interrupted may take to end.
_INTERRUPTED_SECONDS = 30.0


@dataclass(frozen=True)
class Assignment:
    """Everything a worker is told.

    Attributes:
        path, source: the job's file.
        rule: the user's own that is trained with, if it is.
        options: the configuration's values; its class is the job's, which the worker makes from the source.
        folder: of the run, where the first worker keeps metrics before they are sent.
        tracking_uri, run_id: where they are sent; None keeps them in the journal alone.
        left_out: a training environment that is not to be trained on.
        log_context: how it logs.
        access: to the storages of the output and the data, see :func:`concord.storage.access`.
    """

    path: str
    # Ray keeps how its configuration looks as text: what is long, or may hold a password, is not in it.
    source: str = field(repr=False)
    rule: RuleFile | None
    options: dict[str, Any] = field(repr=False)
    folder: Folder
    tracking_uri: str | None = field(repr=False)
    run_id: str | None
    left_out: str | None = None
    log_context: logs.Context = field(default_factory=logs.context)
    access: dict[str, str] = field(default_factory=access, repr=False)


@dataclass(frozen=True)
class Trained:
    """What came back.

    Attributes:
        outcome: of the loop.
        checkpoint: folder of the last checkpoint.
        unsent: metrics that the store had not taken by the end; they are in the journal.
        data: what it was trained and evaluated on, part by part; nothing of what is not tracked.
    """

    outcome: Outcome
    checkpoint: Path
    unsent: int
    data: tuple[DataSummary, ...] = ()


@contextlib.contextmanager
def ray_session(config: RunConfig, tracked_by_workers: bool = True) -> Iterator[str | None]:
    """Connect to the cluster of ``--address`` or RAY_ADDRESS, or start Ray on this machine; undone at the end.

    A session that is already there is used and left as it is. Gives the dashboard's address, if it was started here.
    What SIGTERM does in this process stays as it was: Ray would end the process without a word.

    Args:
        config: says where, and what is wanted there.
        tracked_by_workers: whether workers, which may be on other nodes, write to the tracking store.

    Raises:
        InputError: no cluster at the address, or too few resources there for the workers.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _HEALTH_CHECK_SECONDS)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it shows what a job prints twice
    if getattr(config, "min_workers", None) is not None:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _GROUP_SECONDS)
    import ray

    if ray.is_initialized():
        check_resources(config)
        yield None
        return
    check_cluster(config)
    address, option = cluster_address(config)
    connecting: dict[str, str] = {}
    if address == LOCAL:  # nothing preempts this machine, and the watcher warns of itself
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        check_min_workers(config, float(os.cpu_count() or 1))
    else:  # something answers there: what is no Ray cluster after one try, which takes up to a minute, is none
        connecting = {_CONNECTING_SECONDS: os.environ.get(_CONNECTING_SECONDS, "1")}
    logging.getLogger("ray").setLevel(logging.ERROR)
    structured: dict[str, Any] = (
        {"logging_config": ray.LoggingConfig(encoding="JSON", log_level="ERROR")} if logs.as_json() else {}
    )
    try:
        with _sigterm_as_it_is(), environment_variables(connecting):
            context = ray.init(address=address, logging_level=logging.ERROR, configure_logging=True, **structured)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{option} {address}: no Ray cluster answers there ({reason})") from error
    if structured:
        logs.use_json()  # what Ray has set up for this process would write each line once more
        logs.know(job_id=ray.get_runtime_context().get_job_id())
        logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        check_resources(config)
        if tracked_by_workers:
            _check_shared_storage(config)
        with ended_with_driver() if address == LOCAL else contextlib.nullcontext():
            yield f"http://{context.dashboard_url}" if context.dashboard_url else None
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _sigterm_as_it_is() -> Iterator[None]:
    """Undo what the body does to SIGTERM's handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_resources(config: RunConfig) -> None:
    """Refuse more GPUs or CPUs than the cluster has (InputError): Ray would wait for them for ever."""
    import ray

    resources = ray.cluster_resources()
    gpus, cpus = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    wanted, said = config.gpu_request()
    if wanted > gpus:
        raise InputError(f"{said}; the Ray cluster has {gpus:g}")
    check_min_workers(config, cpus)


def check_min_workers(config: RunConfig, cpus: float) -> None:
    """Refuse more than there are CPUs (InputError)."""
    least = getattr(config, "min_workers", None)
    if least is not None and least > cpus:
        raise InputError(f"--min-workers {least}: each takes a CPU; the Ray cluster has {cpus:g}")


def _check_shared_storage(config: RunConfig) -> None:
    """Refuse a store in a file where workers may be on other nodes than the file (InputError)."""
    import ray

    nodes = sum(node["Alive"] for node in ray.nodes())
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
    if nodes > 1 and uri.startswith("sqlite"):
        raise InputError(
            f"--tracking-uri {redact(uri)}: the Ray cluster has {nodes} nodes, and SQLite is on one; "
            "give the address of an MLflow server"
        )


def train_on_ray(
    job: JobFile,
    config: TrainConfig,
    run_folder: Folder,
    tracking_uri: str | None,
    run_id: str | None,
    left_out: str | None = None,
) -> Trained:
    """Train in ``config.workers`` Ray Train workers; an existing checkpoint of the run is where it goes on.

    With ``config.min_workers`` the group may shrink to that and grow again. Each new group begins at the last
    checkpoint and divides the environments anew, so none is missed or counted twice: as rules only sum over
    environments, the result is the undisturbed run's, but for the order in which numbers are added.

    Raises:
        InputError: the data, or the checkpoint, do not fit; said by a worker.
        RunFailedError: training failed, also after ``max_failures`` replacements.
    """
    import ray.train
    from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    # Annotated by Ray as the classes of its first training library, which lack options of the present one.
    run_config: Any = ray.train.RunConfig
    scaling_config: Any = ray.train.ScalingConfig
    cpus = ray.cluster_resources().get("CPU", 1.0)
    elastic = config.min_workers is not None
    trainer: Any = TorchTrainer(
        cast(Any, _work),
        train_loop_config={
            "assignment": Assignment(
                job.path, job.source, job.rule, dict(vars(config)), run_folder, tracking_uri, run_id, left_out
            )
        },
        scaling_config=scaling_config(
            num_workers=(config.min_workers, config.workers) if config.min_workers is not None else config.workers,
            elastic_resize_monitor_interval_s=_RESIZE_SECONDS,
            use_gpu=config.use_gpu,
            # Workers share the cores there are: more workers than cores train, if slowly, instead of waiting. Not where
            # their number may change: Ray finds out by whole CPUs how many there is room for.
            resources_per_worker={
                "CPU": 1.0 if elastic else min(1.0, cpus / config.workers),
                **({"GPU": 1} if config.use_gpu else {}),
            },
        ),
        run_config=run_config(
            name=_CHECKPOINTS,
            **run_folder.place_for_ray(),
            failure_config=FailureConfig(max_failures=config.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            # What failed is said once, by what is raised here; Ray says it with a traceback of its own for every try.
            logging_config=LoggingConfig(log_level="CRITICAL"),
        ),
    )
    run_folder.remove(ERROR)
    _remove_partial_checkpoints(run_folder)
    try:
        with _interruptible(), _this_cluster():
            result = trainer.fit()
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        why = run_folder.problem() or _recorded_error(run_folder) or full_disk(error, run_folder.path) or _cause(error)
        raise RunFailedError(f"training failed: {why}") from error
    said: dict[str, Any] = result.return_value
    if "input_error" in said:
        raise said["input_error"]
    if "error" in said:
        raise RunFailedError(said["error"])
    assert result.checkpoint is not None
    history = tuple(Evaluation(*evaluation) for evaluation in said["history"])
    checkpoint = _fetched(run_folder, result.checkpoint)
    return Trained(
        Outcome(history, said["seconds"], said["steps"]), checkpoint, said["unsent"], tuple(said.get("data", ()))
    )


def _fetched(run_folder: Folder, checkpoint: Any) -> Path:
    """A checkpoint's files on this machine.

    Not by Ray's own way, which writes what is called ``../name`` in a storage outside the folder.

    Raises:
        InputError: it holds such a file.
    """
    path = Path(checkpoint.path)
    return run_folder.fetch_tree(f"{_CHECKPOINTS}/{path.name}") if run_folder.remote else path


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C be what it is elsewhere: Ray Train takes it for its own, here and ever after, and ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _this_cluster() -> Iterator[None]:
    """Tell Ray Train's actors which cluster is theirs: one looks for it, and fails where several Rays run on a machine.

    By the list of what Ray Train passes on, which is not public; without it the run is the same, but for a traceback.
    """
    import ray

    with contextlib.suppress(ImportError, AttributeError):
        from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

        ENV_VARS_TO_PROPAGATE.add("RAY_ADDRESS")
    with environment_variables({"RAY_ADDRESS": ray.get_runtime_context().gcs_address}):
        yield


def distributed_evaluations(
    job: JobFile, config: TrainConfig, folder: Folder, left_out: str | None = None
) -> Iterator[Evaluation]:
    """Train as :func:`train_on_ray` does, and give every evaluation as it comes; to be called inside a Ray cluster.

    Closing the iterator ends the training. Nothing is tracked; ``folder`` is used until the end.

    Raises:
        InputError, RunFailedError: as :func:`train_on_ray`.
    """
    import ray

    folder.path.mkdir(parents=True)
    # The first worker may be on another node, or write to the very file on this one.
    lines, journal = folder.lines(METRICS), folder.path / (f"{METRICS}.seen" if folder.remote else METRICS)
    config = dataclasses.replace(config, checkpoints=1)
    # In a process of its own, so that it can be interrupted. Should it be killed instead, Ray Train looks for its
    # cluster to give the workers' CPUs back, and does not know which where several run on one machine.
    cluster = {"env_vars": {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}}
    task: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env=cluster)(cast(Any, _last_evaluation))
    trained = task.remote(job.path, job.source, job.rule, dict(vars(config)), folder, left_out, access())
    try:
        seen, file, given, finished = 0, 0, 0, False
        while not finished:
            finished = bool(ray.wait([trained], timeout=0.5)[0])
            lines.fetch(into=journal)
            if not journal.exists():
                continue
            if (now := journal.stat().st_ino) != file:  # workers that begin anew put another in its place
                seen, file = 0, now
            for entry in entries(journal, seen):
                seen = entry.end
                if "train_loss" not in entry.metrics:
                    continue
                evaluation = Evaluation(int(entry.metrics["epoch"]), entry.step, entry.metrics)
                if given < evaluation.epoch < config.epochs and not evaluation.ended_early:
                    given = evaluation.epoch
                    yield evaluation
        result = ray.get(trained)
        if isinstance(result, Exception):
            raise result
        yield result
    finally:
        # What Ctrl-C is to Ray Train: it ends the workers, and gives their CPUs back.
        ray.cancel(trained, recursive=False)
        if not ray.wait([trained], timeout=_INTERRUPTED_SECONDS)[0]:
            ray.cancel(trained, force=True)


def _last_evaluation(
    path: str,
    source: str,
    rule: RuleFile | None,
    options: dict[str, Any],
    folder: Folder,
    left_out: str | None,
    given: dict[str, str],
) -> Evaluation | Exception:
    """Train; gives the last evaluation, or what went wrong."""
    granted(given)
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    job = job_from_source(path, source, rule)
    try:
        trained = train_on_ray(job, job.job.config(**options), folder, None, None, left_out)
    except InputError as error:
        return to_be_sent(error)
    except RunFailedError as error:
        return type(error)(str(error))
    return trained.outcome.history[-1]


def _work(loop_config: dict[str, Any]) -> dict[str, Any]:
    """One worker. What is wrong with input or model comes back as a value: to start again would not mend it."""
    import ray.train
    import ray.train.collective
    import ray.train.torch

    assignment: Assignment = loop_config["assignment"]
    granted(assignment.access)
    context = ray.train.get_context()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    tune_process(threads=max(1, cores // context.get_local_world_size()))
    place = Place(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    here = ray.get_runtime_context()
    logs.take_over(assignment.log_context, rank=place.rank, worker_id=here.get_worker_id(), node_id=here.get_node_id())
    _quiet_ray_train()
    checkpoint = ray.train.get_checkpoint()
    log, failed = _metric_log(assignment, checkpoint) if place.rank == 0 else (None, None)
    failed = ray.train.collective.broadcast_from_rank_zero(failed)
    if failed:
        return {"error": failed}
    last_metrics_seconds = _LAST_METRICS_SECONDS
    reporter = _RayReporter(place.rank, log, assignment.folder)
    data: list[DataSummary] = []
    try:
        file = job_from_source(assignment.path, assignment.source, assignment.rule)
        job, name = file.job, file.name
        folder = _fetched(assignment.folder, checkpoint) if checkpoint else None
        config = job.config(**assignment.options)

        def load() -> Prepared:
            prepared = prepare(job, config, place, assignment.left_out)
            if assignment.run_id is not None:  # otherwise one of a study's many trials
                data.extend(prepared.summaries())
            return prepared

        with _watched(assignment, name, config, place) as so_far:
            outcome = train(job, config, place, reporter, folder, load, so_far)
        data = _of_all(data, place)
    except InputError as error:  # raised in every worker
        return {"input_error": to_be_sent(error)}
    except NonFiniteGradientError as error:  # raised in every worker
        return {"error": str(error)}
    except FullDiskError as error:  # raised in every worker
        last_metrics_seconds = _FULL_DISK_METRICS_SECONDS
        return {"error": str(error)}
    except Exception as error:
        # Raised in this worker while others wait for it: Ray has to end them. A mistake in the job would only be
        # made again, so the group that is started next finds it written down.
        if not _is_communication(error):
            with contextlib.suppress(OSError):  # a folder that is not on this node must not hide the mistake
                text = redact(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
                (assignment.folder.path / ERROR).write_text(text)
                assignment.folder.keep(ERROR)
        raise
    finally:
        unsent = log.close(last_metrics_seconds) if log else 0
    return {
        "history": [tuple(evaluation) for evaluation in outcome.history],
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "unsent": unsent,
        "data": data,
    }


def _of_all(data: list[DataSummary], place: Place) -> list[DataSummary]:
    """What all processes have, in order, each part once."""
    gathered: list[list[DataSummary]] = [data]
    if place.world > 1:
        gathered = [[] for _ in range(place.world)]
        torch.distributed.all_gather_object(gathered, data)
    parts = list(dict.fromkeys(part for of_one in gathered for part in of_one))
    return sorted(parts, key=lambda part: PURPOSES.index(part.purpose))


@contextlib.contextmanager
def _watched(assignment: Assignment, job: str, config: TrainConfig, place: Place) -> Iterator[StepsSoFar]:
    """Show what the worker does as it does it."""
    so_far = StepsSoFar()
    if assignment.run_id is None:  # one of a study's many trials
        yield so_far
        return
    labels = {"run": str(config.name), "concord_job": job, "method": config.method, "rank": str(place.rank)}
    with Published(RUN_METRICS, labels, RunSamples(so_far, first=place.rank == 0)):
        yield so_far


def _quiet_ray_train() -> None:
    """Ray Train logs every report of every worker, past its own log level; what the user logs still comes through."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "/ray/train/" not in record.pathname or record.levelno >= logging.CRITICAL)


def _metric_log(assignment: Assignment, checkpoint: Any) -> tuple[MetricLog | None, str | None]:
    """The log of a run that goes on from a checkpoint, or begins; or why its workers need not begin (again)."""
    folder = assignment.folder
    try:
        folder.check_claim()
        if assignment.run_id is not None and (gone := missing_run(folder)):
            return None, gone
        if error := _recorded_error(folder):
            return None, error
        with folder.in_one_line():
            start = checkpoint.get_metadata().get(_JOURNAL_LENGTH) if checkpoint else 0
        with full_disk_in_one_line(folder.path):
            log = MetricLog.going_on(folder.lines(METRICS), assignment.tracking_uri, assignment.run_id, start)
    except (TakenOverError, FullDiskError) as problem:
        return None, str(problem)
    return log, None


class _RayReporter:
    """Metrics to the log, checkpoints through Ray Train."""

    def __init__(self, rank: int, log: MetricLog | None, folder: Folder) -> None:
        self._rank = rank
        self._log = log
        self._folder = folder

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._log is not None:
            self._log.log(metrics, step)

    def checkpoint(self, write: Callable[[Path], None], metrics: dict[str, float]) -> None:
        import ray.train

        if self._rank != 0:
            self._end_together(None)
            ray.train.report({})
            self._end_together(None)
            return
        with tempfile.TemporaryDirectory() as folder:
            self._end_together(_what_fills_a_disk(lambda: self._prepare(Path(folder), write)))
            short = {name: value for name, value in metrics.items() if "/" not in name}
            self._end_together(_what_fills_a_disk(lambda: self._report(Path(folder), short)))

    def _end_together(self, problem: str | None) -> None:
        """Raise in every worker what the first one found: others would wait for it, and be started again in vain."""
        import ray.train.collective

        problem = ray.train.collective.broadcast_from_rank_zero(problem)
        if problem is not None:
            raise FullDiskError(problem)

    def _prepare(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Write a checkpoint into a folder of its own, with how long the journal is, which is kept before."""
        import ray.train

        place = self._folder.path
        with full_disk_in_one_line(place):
            length = self._log.keep() if self._log is not None else 0
        with full_disk_in_one_line(folder):
            write(folder)
            # Who goes on from here cuts the journal there, and logs what comes after it anew.
            ray.train.Checkpoint.from_directory(folder).update_metadata({_JOURNAL_LENGTH: length})
        if not self._folder.remote:
            require_space(place, sum(file.stat().st_size for file in folder.rglob("*")))

    def _report(self, folder: Path, metrics: dict[str, float]) -> None:
        """Have Ray Train keep the checkpoint; what is there of one that a full disk cut short is removed again."""
        import ray.train

        before = set() if self._folder.remote else set(self._folder.names(_CHECKPOINTS))
        try:
            with full_disk_in_one_line(self._folder.path), self._folder.in_one_line():
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
        except FullDiskError:
            for partial in set(self._folder.names(_CHECKPOINTS)) - before:
                self._folder.remove(f"{_CHECKPOINTS}/{partial}")
            raise


def _what_fills_a_disk(do: Callable[[], None]) -> str | None:
    """Do something; gives the line that says which disk is full, if that is why it failed."""
    try:
        do()
    except FullDiskError as error:
        return str(error)
    return None


def _remove_partial_checkpoints(folder: Folder) -> None:
    """Remove what Ray Train does not know as a checkpoint: a process was killed as it was written.

    For when none is being written, and Ray Train has not begun.
    """
    snapshot = f"{_CHECKPOINTS}/{_SNAPSHOT}"
    if folder.remote:
        folder.fetch(snapshot)
    try:
        text = (folder.path / snapshot).read_text()
        json.loads(text)
    except FileNotFoundError:
        text = ""
    except (OSError, ValueError):
        return  # nobody knows
    for name in folder.names(_CHECKPOINTS):
        if name.startswith("checkpoint_") and name != _SNAPSHOT and f'"{name}"' not in text:
            folder.remove(f"{_CHECKPOINTS}/{name}")


def _recorded_error(folder: Folder) -> str | None:
    folder.fetch(ERROR)
    path = folder.path / ERROR
    return path.read_text() if path.exists() else None


def _is_communication(error: Exception) -> bool:
    from ray.exceptions import RayError

    distributed = tuple(
        kind
        for kind in (getattr(torch.distributed, name, None) for name in ("DistError", "DistBackendError"))
        if isinstance(kind, type)
    )
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "socket")
    # Ray's own come of workers that wait for one that died.
    return isinstance(error, (ConnectionError, TimeoutError, RayError, *distributed)) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def _cause(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[-1] if lines else type(error).__name__
