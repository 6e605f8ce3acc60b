"""The training loop on Ray Train: workers that own their environments, replaced when they die.

The first worker tells a :class:`~concord.runs.channel.Channel` what happens; this process takes it from there. Workers
begin at the last checkpoint that was told. With ``--min-workers`` the group may shrink to that number and grow again.
Each new group divides the environments anew, so none is missed or counted twice: as rules only sum over environments,
the result is the undisturbed run's, but for the order in which numbers are added.
"""

import logging
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

from concord import logs
from concord.errors import InputError, TrainingFailedError, picklable
from concord.gradients import NonFiniteGradientError
from concord.process_environment import environment_variables
from concord.runs.channel import FAILED, Channel, Message
from concord.runs.execute import RunSpec, Sink, broadcast_from_rank0, evaluations_here, failure
from concord.runs.failures import is_outage
from concord.runs.live_metrics import RUN_METRICS, Published, RunSamples
from concord.storage import Folder, FullDiskError, apply_credentials, full_disk
from concord.training.context import ProcessContext
from concord.training.options import RunConfig
from concord.training.outcome import Evaluation
from concord.training.process import own_cores, tune_process
from concord.training.steps_so_far import StepsSoFar

# Of a run with a range of workers: how often Ray Train checks whether there is room for more. Each time it costs what
# was done since the last checkpoint.
_RESIZE_SECONDS = 30.0
# How long workers that are stopped may take to end.
_STOPPING_SECONDS = 30.0
_TAKE_SECONDS = 0.5
_SCRATCH = "ray-train"


def evaluations_on_ray(
    spec: RunSpec, config: RunConfig, sink: Sink, start: str | None
) -> Generator[Evaluation, None, None]:
    """Train in ``--workers`` Ray Train workers, in the Ray that this process is connected to.

    Raises:
        InputError: the data, or the checkpoint, do not fit; found by a worker.
        TrainingFailedError: also after ``--max-failures`` replacements.
    """
    import ray

    scratch = spec.scratch or (spec.folder or Folder(config.run.output)) / _SCRATCH
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Channel)
    channel = actor.remote(start)
    training = _Training(spec, config, channel, scratch)
    training.start()
    try:
        while True:
            over = not training.is_alive()  # read before taking: then all that was told is there
            for message in ray.get(channel.take.remote(_TAKE_SECONDS)):
                if message.name == FAILED:
                    raise message.fields["error"]
                if message.name != "evaluated":
                    sink(message.name, **message.fields)
                else:
                    yield Evaluation(**message.fields)
            if over:
                break
        if training.error is not None:
            raise TrainingFailedError(_reason(training.error, spec)) from training.error
    finally:
        if training.is_alive():
            channel.stop.remote()
            training.join(_STOPPING_SECONDS)
        ray.kill(channel)
        scratch.delete()


class _Training(threading.Thread):
    """Ray Train at work, in a thread of its own, so that this process can go on taking what the workers tell."""

    def __init__(self, spec: RunSpec, config: RunConfig, channel: Any, scratch: Folder) -> None:
        super().__init__(name="concord-ray-train", daemon=True)
        self._trainer = _trainer(spec, config, channel, scratch)
        self.error: BaseException | None = None

    def run(self) -> None:
        """Train to the end."""
        try:
            with _this_cluster():
                self._trainer.fit()
        except BaseException as error:  # raised again in the thread that waits
            self.error = error


@contextmanager
def _this_cluster() -> Iterator[None]:
    """Tell Ray Train's actors which cluster is theirs: one looks for it, and fails where several Rays run on a machine.

    By the list of what Ray Train passes on, which is not public; without it the run is the same, but for a traceback.
    """
    import ray

    with suppress(ImportError, AttributeError):
        from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

        ENV_VARS_TO_PROPAGATE.add("RAY_ADDRESS")
    with environment_variables({"RAY_ADDRESS": ray.get_runtime_context().gcs_address}):
        yield


def _trainer(spec: RunSpec, config: Any, channel: Any, scratch: Folder) -> Any:
    import ray.train
    from ray.train import FailureConfig, LoggingConfig
    from ray.train.torch import TorchTrainer

    # Annotated by Ray as the classes of its first training library, which lack options of the present one.
    run_config: Any = ray.train.RunConfig
    scaling_config: Any = ray.train.ScalingConfig
    trainer: Any = TorchTrainer
    cpus = ray.cluster_resources().get("CPU", 1.0)
    workers, least = config.parallel.workers, config.parallel.min_workers
    return trainer(
        cast(Any, work),
        train_loop_config={"spec": spec, "channel": channel},
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
            name="run",
            **scratch.place_for_ray(),
            failure_config=FailureConfig(max_failures=config.parallel.max_failures),
            # What failed is told once, by what is raised here; Ray logs it with a traceback of its own for every try.
            logging_config=LoggingConfig(log_level="CRITICAL"),
        ),
    )


class _StoppedError(Exception):
    """The run was stopped, or has failed."""


class _Teller:
    """Tells the channel what happens; a sink in the first worker, and nothing in the others."""

    def __init__(self, channel: Any, process: ProcessContext) -> None:
        self._channel = channel
        self._first = process.rank == 0
        self._answer: Any = None

    def __call__(self, name: str, /, **fields: Any) -> None:
        """Tell an event.

        Raises:
            _StoppedError: the run has to end; known from the answer to what was told before.
        """
        import ray

        if not self._first:
            return
        # An answer is waited for at the rarer events alone: those of steps must cost the loop nothing.
        patience = None if name in ("checkpoint", "evaluated") else 0
        if self._answer is not None and ray.wait([self._answer], timeout=patience)[0] and ray.get(self._answer):
            raise _StoppedError
        self._answer = self._channel.tell.remote([Message(name, fields)])

    def finish(self) -> None:
        """Wait until everything was taken."""
        import ray

        if self._answer is not None:
            ray.get(self._answer)


def work(loop_config: Mapping[str, Any]) -> None:
    """One worker of Ray Train. What new workers would only repeat is told, and none begins again."""
    import ray
    import ray.train
    import ray.train.torch

    spec: RunSpec = loop_config["spec"]
    channel = loop_config["channel"]
    apply_credentials(spec.storage_credentials)
    context = ray.train.get_context()
    tune_process(threads=max(1, own_cores() // context.get_local_world_size()))
    process = ProcessContext(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    here = ray.get_runtime_context()
    logs.inherit_context(
        spec.log_context, rank=process.rank, worker_id=here.get_worker_id(), node_id=here.get_node_id()
    )
    _quiet_ray_train()
    beginning = broadcast_from_rank0(ray.get(channel.begin.remote()) if process.rank == 0 else None, process)
    if beginning.over:
        return
    tell = _Teller(channel, process)
    try:
        file = spec.job()
        config = file.job.config.with_options(**spec.options)
        with _exported(spec, file.name, config, process) as so_far:
            for evaluation in evaluations_here(
                spec, file.job, config, process, tell, beginning.checkpoint, so_far=so_far
            ):
                tell("evaluated", **evaluation._asdict())
        tell.finish()
    except (InputError, NonFiniteGradientError, FullDiskError) as error:  # raised in every worker
        if process.rank == 0:
            told = picklable(error) if isinstance(error, InputError) else error
            _fail(channel, failure(error, spec.path) if isinstance(told, NonFiniteGradientError) else told)
    except (Exception, SystemExit) as error:
        # Raised in this worker while others wait for it: they have to be ended.
        if isinstance(error, SystemExit) or not (isinstance(error, _StoppedError) or is_outage(error)):
            _fail(channel, failure(error, spec.path))
        raise


def _fail(channel: Any, error: Exception) -> None:
    """Tell a failure that new workers would only repeat."""
    import ray

    ray.get(channel.tell.remote([Message(FAILED, {"error": error})]))


@contextmanager
def _exported(spec: RunSpec, job: str, config: Any, process: ProcessContext) -> Iterator[StepsSoFar]:
    """Show in Ray's metrics what the worker does; not for one of a study's many trials."""
    so_far = StepsSoFar()
    if spec.folder is None:
        yield so_far
        return
    labels = {"run": str(config.run.name), "concord_job": job, "method": config.method, "rank": str(process.rank)}
    with Published(RUN_METRICS, labels, RunSamples(so_far, first=process.rank == 0)):
        yield so_far


def _quiet_ray_train() -> None:
    """Ray Train logs every report of every worker, past its own log level; what the user logs still comes through."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "/ray/train/" not in record.pathname or record.levelno >= logging.CRITICAL)


def _reason(error: BaseException, spec: RunSpec) -> str:
    """Why training failed, in one line."""
    if spec.folder is not None and (why := spec.folder.problem() or full_disk(error, spec.folder.path)):
        return why
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[-1] if lines else type(error).__name__
