"""The training loop on Ray Train: workers that own their environments, replaced when they die."""

import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from concord import logs
from concord.aggregation.rule_file import RuleFile
from concord.errors import InputError, RunFailedError, to_be_sent
from concord.options import option_values
from concord.process_environment import environment_variables
from concord.runs.checkpoints import CHECKPOINTS, KEPT, remove_partial_checkpoints
from concord.runs.termination import signal_handler
from concord.runs.worker import ERROR, METRICS, Trained, WorkerSpec, recorded_error, trained, work_as
from concord.storage import Folder, apply_credentials, full_disk, storage_credentials
from concord.tracking.journal import entries
from concord.training.job import JobFile, job_from_source
from concord.training.loop import ProcessContext
from concord.training.options import TrainConfig
from concord.training.outcome import Evaluation
from concord.training.process import own_cores, tune_process

# Of a run with a range of workers: how often it is looked whether there is room for more. To take them in costs what
# was done since the last checkpoint.
_RESIZE_SECONDS = 30.0
# How long workers that are interrupted may take to end.
_INTERRUPTED_SECONDS = 30.0


def train_on_ray(
    job: JobFile,
    config: TrainConfig,
    run_folder: Folder,
    tracking_uri: str | None,
    run_id: str | None,
    left_out: str | None = None,
) -> Trained:
    """Train in ``--workers`` Ray Train workers; an existing checkpoint of the run is where it goes on.

    With ``--min-workers`` the group may shrink to that and grow again. Each new group begins at the last
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
    workers, least = config.parallel.workers, config.parallel.min_workers
    trainer: Any = TorchTrainer(
        cast(Any, work),
        train_loop_config={
            "assignment": WorkerSpec(
                job.path, job.source, job.rule, option_values(config), run_folder, tracking_uri, run_id, left_out
            )
        },
        scaling_config=scaling_config(
            num_workers=workers if least is None else (least, workers),
            elastic_resize_monitor_interval_s=_RESIZE_SECONDS,
            use_gpu=config.parallel.use_gpu,
            # Workers share the cores there are: more workers than cores train, if slowly, instead of waiting. Not where
            # their number may change: Ray finds out by whole CPUs how many there is room for.
            resources_per_worker={
                "CPU": min(1.0, cpus / workers) if least is None else 1.0,
                **({"GPU": 1} if config.parallel.use_gpu else {}),
            },
        ),
        run_config=run_config(
            name=CHECKPOINTS,
            **run_folder.place_for_ray(),
            failure_config=FailureConfig(max_failures=config.parallel.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=KEPT),
            # What failed is said once, by what is raised here; Ray says it with a traceback of its own for every try.
            logging_config=LoggingConfig(log_level="CRITICAL"),
        ),
    )
    run_folder.remove(ERROR)
    remove_partial_checkpoints(run_folder)
    try:
        with _interruptible(), _this_cluster():
            result = trainer.fit()
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        why = run_folder.problem() or recorded_error(run_folder) or full_disk(error, run_folder.path) or _cause(error)
        raise RunFailedError(f"training failed: {why}") from error
    return trained(cast(Any, result.return_value), lambda: fetched_checkpoint(run_folder, result.checkpoint))


def work(loop_config: dict[str, Any]) -> dict[str, Any]:
    """One worker of Ray Train."""
    import ray.train
    import ray.train.torch

    assignment: WorkerSpec = loop_config["assignment"]
    apply_credentials(assignment.storage_credentials)
    context = ray.train.get_context()
    tune_process(threads=max(1, own_cores() // context.get_local_world_size()))
    place = ProcessContext(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    here = ray.get_runtime_context()
    logs.inherit_context(
        assignment.log_context, rank=place.rank, worker_id=here.get_worker_id(), node_id=here.get_node_id()
    )
    _quiet_ray_train()
    checkpoint = ray.train.get_checkpoint()
    try:
        start = fetched_checkpoint(assignment.folder, checkpoint) if checkpoint else None
    except InputError as error:
        return {"input_error": to_be_sent(error)}
    return work_as(assignment, place, start, _keep)


def _keep(folder: Path | None, metrics: dict[str, float]) -> None:
    import ray.train

    ray.train.report(metrics, checkpoint=None if folder is None else ray.train.Checkpoint.from_directory(folder))


def fetched_checkpoint(run_folder: Folder, checkpoint: Any) -> Path:
    """A checkpoint's files on this machine.

    Not by Ray's own way, which writes what is called ``../name`` in a storage outside the folder.

    Raises:
        InputError: it holds such a file.
    """
    path = Path(checkpoint.path)
    return run_folder.fetch_tree(f"{CHECKPOINTS}/{path.name}") if run_folder.remote else path


def _quiet_ray_train() -> None:
    """Ray Train logs every report of every worker, past its own log level; what the user logs still comes through."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "/ray/train/" not in record.pathname or record.levelno >= logging.CRITICAL)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C be what it is elsewhere: Ray Train takes it for its own, here and ever after, and ends the process."""
    with signal_handler(signal.SIGINT):
        try:
            yield
        except SystemExit:
            raise KeyboardInterrupt from None


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
    config = config.with_options(checkpoints=1)
    # In a process of its own, so that it can be interrupted. Should it be killed instead, Ray Train looks for its
    # cluster to give the workers' CPUs back, and does not know which where several run on one machine.
    cluster = {"env_vars": {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}}
    task: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env=cluster)(cast(Any, _last_evaluation))
    trained = task.remote(
        job.path, job.source, job.rule, option_values(config), folder, left_out, storage_credentials()
    )
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
                if given < evaluation.epoch < config.schedule.epochs and not evaluation.ended_early:
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
    apply_credentials(given)
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    job = job_from_source(path, source, rule)
    try:
        trained = train_on_ray(job, job.job.config.with_options(**options), folder, None, None, left_out)
    except InputError as error:
        return to_be_sent(error)
    except RunFailedError as error:
        return type(error)(str(error))
    return trained.outcome.history[-1]


def _cause(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[-1] if lines else type(error).__name__
