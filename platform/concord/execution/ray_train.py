"""The training loop on Ray Train: workers that own their environments, replaced when they die.

The first worker sends events to a :class:`~concord.execution.channel.Channel`, from which this process takes them.
Workers begin at the last checkpoint in it. With ``--min-workers`` the group may shrink to that number and grow again.
Each new group divides the environments again, so none is missed or counted twice. Rules only sum over environments, so
the result equals the undisturbed run's up to the order of additions.
"""

import logging
import socket
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, cast

from concord import logs
from concord.errors import InputError, TrainingFailedError, last_line, picklable
from concord.execution import local_ray
from concord.execution.channel import FAILED, LOST, SIGN_SECONDS, Channel, Message, Sign, Waiting
from concord.execution.execute import RunTask, Sink, evaluations_here, system_metrics
from concord.execution.failures import end_at_sigterm, failure, is_outage
from concord.execution.live_metrics import RUN_METRICS, Published, RunSamples
from concord.execution.session import send_by_value
from concord.process_environment import environment_variables
from concord.record import Evaluation
from concord.storage import DiskError, Folder, apply_credentials, disk_error
from concord.training.context import ProcessContext, StepsSoFar
from concord.training.options import ResolvedConfig
from concord.training.process import own_cores, tune_process

# How often Ray Train checks for room for more workers (--min-workers). Growth loses the work since the last checkpoint.
_RESIZE_SECONDS = 30.0
# How long stopped workers may take to end, far less than Ray waits before it kills a stopped job: its end must be
# recorded. Those of a Ray that ends with this process are not waited for.
_STOPPING_SECONDS, _LOCAL_STOPPING_SECONDS = 10.0, 5.0
_TAKE_SECONDS = 0.5
# After this time without a step, and after each doubling of it, a line says which worker is waited for.
_STILL_SECONDS = 60.0
_SCRATCH = "ray-train"


def evaluations_on_ray(
    task: RunTask, config: ResolvedConfig, sink: Sink, start: str | None
) -> Generator[Evaluation, None, None]:
    """Train in ``--workers`` Ray Train workers, in this process's Ray session."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    send_by_value(task.sent.value, task.callbacks)
    scratch = task.scratch or task.folder / _SCRATCH
    # On this process's node: Ray places an actor without resources anywhere, and the run would end with that node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Channel)
    channel = actor.options(scheduling_strategy=here).remote(start)
    training = _Training(task, config, channel, scratch)
    training.start()
    patience, looked = _STILL_SECONDS, time.monotonic()
    try:
        while True:
            if time.monotonic() - looked > SIGN_SECONDS:
                patience, looked = _tell_waiting(ray.get(channel.waiting.remote()), patience), time.monotonic()
            over = not training.is_alive()  # read first: then the following take gets all messages
            for message in ray.get(channel.take.remote(_TAKE_SECONDS)):
                if message.name == FAILED:
                    raise message.fields["error"]
                if message.name == LOST:
                    logs.info("a worker died; new workers begin at the last checkpoint", logging.WARNING)
                    continue
                sink(message.name, **message.fields)
                if message.name == "evaluated":
                    yield Evaluation(**message.fields)
            if over:
                break
        if training.error is not None:
            raise TrainingFailedError(_reason(training.error, task)) from training.error
    finally:
        if training.is_alive():
            local = local_ray.is_running()
            local_ray.show_lines(not local)
            _end(channel)
            training.join(_LOCAL_STOPPING_SECONDS if local else _STOPPING_SECONDS)
        ray.kill(channel)
        scratch.delete()


def _tell_waiting(workers: Sequence[Waiting], patience: float) -> float:
    """Say which worker the others wait for, after this number of seconds without a step; return the next patience."""
    if not workers or (still := min(each.still for each in workers)) < patience:
        return patience if workers and still >= _STILL_SECONDS else _STILL_SECONDS
    first, most = workers[0], max(each.sign.steps for each in workers)
    environments = ", ".join(first.sign.environments) or "not known yet"
    of = f"worker {first.sign.rank} on {first.sign.node} (environments: {environments})"
    since = f"since {datetime.now() - timedelta(seconds=still):%H:%M:%S}"
    if first.silent > 3 * SIGN_SECONDS:
        why = f"{of} has not answered for {first.silent:.0f} s, and the others wait for it"
    elif first.sign.steps < most:
        why = f"{of} is at step {first.sign.steps}, and the others, at step {most}, wait for it"
    else:
        why = f"all {len(workers)} workers answer, at step {most}"
    logs.info(f"no step {since}: {why}", logging.WARNING)
    return 2 * patience


def _end(channel: Any) -> None:
    """End Ray Train's controller with its workers: workers alone would be replaced by new ones."""
    import ray

    with suppress(ray.exceptions.RayError):
        if (controller := ray.get(channel.stop.remote(), timeout=_STOPPING_SECONDS)) is not None:
            ray.wait([controller.abort.remote()], timeout=_STOPPING_SECONDS)


class _Training(threading.Thread):
    """Runs Ray Train in a thread, so that this process can take the workers' messages."""

    def __init__(self, task: RunTask, config: ResolvedConfig, channel: Any, scratch: Folder) -> None:
        super().__init__(name="concord-ray-train", daemon=True)
        self._trainer = _trainer(task, config, channel, scratch)
        self.error: BaseException | None = None

    def run(self) -> None:
        """Train to the end."""
        try:
            with _this_cluster():
                self._trainer.fit()
        except BaseException as error:  # raised again in the waiting thread
            self.error = error


@contextmanager
def _this_cluster() -> Iterator[None]:
    """Give Ray Train's actors the cluster's address: one searches for it, and fails if several Rays run on a machine.

    This extends a private list of variables that Ray Train passes on; without it a run only shows a traceback.
    """
    import ray

    with suppress(ImportError, AttributeError):
        from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

        ENV_VARS_TO_PROPAGATE.add("RAY_ADDRESS")
    with environment_variables({"RAY_ADDRESS": ray.get_runtime_context().gcs_address}):
        yield


def _trainer(task: RunTask, config: Any, channel: Any, scratch: Folder) -> Any:
    import ray.train
    from ray.train import FailureConfig, LoggingConfig
    from ray.train.torch import TorchTrainer

    # Ray annotates these with classes of its older training library, which lack some options.
    run_config: Any = ray.train.RunConfig
    scaling_config: Any = ray.train.ScalingConfig
    trainer: Any = TorchTrainer
    cpus = ray.cluster_resources().get("CPU", 1.0)
    workers, least = config.parallel.workers, config.parallel.min_workers
    on_gpu = config.parallel.device == "cuda"
    return trainer(
        cast(Any, work),
        train_loop_config={"task": task, "channel": channel},
        scaling_config=scaling_config(
            num_workers=workers if least is None else (least, workers),
            elastic_resize_monitor_interval_s=_RESIZE_SECONDS,
            use_gpu=on_gpu,
            # Workers share the cores: with more workers than cores, they train slowly instead of waiting. With
            # --min-workers each takes a whole CPU, by which Ray counts the workers that fit.
            resources_per_worker={
                "CPU": min(1.0, cpus / workers) if least is None else 1.0,
                **({"GPU": 1} if on_gpu else {}),
            },
        ),
        run_config=run_config(
            name="run",
            **scratch.place_for_ray(),
            failure_config=FailureConfig(max_failures=config.parallel.max_failures),
            # The failure is reported once, by the exception here; Ray logs it with a traceback for every try.
            logging_config=LoggingConfig(log_level="CRITICAL"),
            callbacks=[_attended(channel)],
        ),
    )


def _attended(channel: Any) -> Any:
    """A callback of the controller that makes itself known to the channel, and says when it replaces workers that died.

    Ray Train has no public way to end it, nor to know of a death before the new workers are there, which may take long.
    """
    from ray.train.v2._internal.execution.callback import ControllerCallback

    class Attended(ControllerCallback):
        def after_controller_start(self, train_run_context: Any) -> None:  # noqa: ARG002
            import ray

            channel.attend.remote(ray.get_runtime_context().current_actor)

        def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
            if failure_decision.name == "RETRY":
                channel.lose.remote()

    return Attended()


class _StoppedError(Exception):
    """The run was stopped or has failed."""


class _EventSender:
    """Sends events to the channel; a sink for the first worker."""

    def __init__(self, channel: Any, process: ProcessContext) -> None:
        self._channel = channel
        self._first = process.rank == 0
        self._answer: Any = None

    def __call__(self, name: str, /, **fields: Any) -> None:
        """Send an event."""
        import ray

        if not self._first:
            return
        # Wait for an answer only at rare events: those of steps must not delay the loop.
        patience = None if name in ("checkpoint", "evaluated") else 0
        if self._answer is not None and ray.wait([self._answer], timeout=patience)[0] and ray.get(self._answer):
            raise _StoppedError
        self._answer = self._channel.send.remote([Message(name, fields)])

    def system(self, metrics: dict[str, float], step: int) -> None:
        """Send a sample of this worker's machine, of the other workers as well; called in another thread."""
        self._channel.send.remote([Message("system", {"step": step, "metrics": metrics})])

    def finish(self) -> None:
        """Wait until all messages were taken."""
        import ray

        if self._answer is not None:
            ray.get(self._answer)


def work(loop_config: Mapping[str, Any]) -> None:
    """One worker of Ray Train. It reports failures that a restart would repeat, so that no worker begins again."""
    import ray
    import ray.train
    import ray.train.torch

    task: RunTask = loop_config["task"]
    channel = loop_config["channel"]
    end_at_sigterm()
    apply_credentials(task.storage_credentials)
    context = ray.train.get_context()
    tune_process(max(1, own_cores() // context.get_local_world_size()), task.threads)
    process = ProcessContext(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    here = ray.get_runtime_context()
    logs.inherit_context(
        task.log_context, rank=process.rank, worker_id=here.get_worker_id(), node_id=here.get_node_id()
    )
    _quiet_ray_train()
    beginning = process.broadcast_from_rank0(ray.get(channel.begin.remote()) if process.rank == 0 else None)
    if beginning.over:
        return
    tell = _EventSender(channel, process)
    try:
        file = task.sent.load()
        config = task.config(file)
        with (
            system_metrics(task, process.rank, tell.system),
            _exported(task, file.name, config, process, beginning.restarts) as so_far,
            _signs(channel, process.rank, so_far),
        ):
            for _ in evaluations_here(task, file.job, config, process, tell, beginning.checkpoint, so_far=so_far):
                pass
        tell.finish()
    except (Exception, SystemExit) as error:
        # A worker may raise alone, as for an example that cannot be read, while others wait for it: end them.
        if isinstance(error, InputError):
            _fail(channel, picklable(error))
        elif isinstance(error, DiskError):
            _fail(channel, error)
        elif isinstance(error, SystemExit) or not (isinstance(error, _StoppedError) or is_outage(error)):
            _fail(channel, failure(error, task.path))
        raise


def _fail(channel: Any, error: Exception) -> None:
    """Report a failure that a restart would repeat."""
    import ray

    ray.get(channel.send.remote([Message(FAILED, {"error": error})]))


@contextmanager
def _exported(task: RunTask, job: str, config: Any, process: ProcessContext, restarts: int) -> Iterator[StepsSoFar]:
    """Export the worker's state as Ray metrics; not for the many trials of a study."""
    so_far = StepsSoFar(restarts=restarts)
    if task.checkpoint_seconds is not None:
        yield so_far
        return
    labels = {"run": str(config.run.name), "concord_job": job, "method": config.method, "rank": str(process.rank)}
    with Published(RUN_METRICS, labels, RunSamples(so_far, first=process.rank == 0)):
        yield so_far


@contextmanager
def _signs(channel: Any, rank: int, so_far: StepsSoFar) -> Iterator[None]:
    """Tell the channel at once and every few seconds that this worker is there, and at which step."""
    import ray

    over, node = threading.Event(), socket.gethostname()

    def sign() -> Any:
        return channel.hear.remote(Sign(rank, node, so_far.steps, so_far.environments))

    def tell() -> None:
        while not over.wait(SIGN_SECONDS):
            sign()

    ray.get(sign())  # a worker that was never heard could not be missed
    thread = threading.Thread(target=tell, name="concord-sign", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _quiet_ray_train() -> None:
    """Silence Ray Train's log of every report, which ignores its log level; the user's logs remain."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "/ray/train/" not in record.pathname or record.levelno >= logging.CRITICAL)


def _reason(error: BaseException, task: RunTask) -> str:
    """The reason for a failed training, in one line."""
    if why := task.folder.problem() or disk_error(error, task.folder.path):
        return str(why)
    return last_line(error)
