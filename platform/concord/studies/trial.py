"""A run of a group in its process: its share of the cluster, its data, and one evaluation after the other.

The process lives as long as the pool. It imports, reads the job and maps the shared data only once, so a new run costs
little more than its training. The shared data are loaded once and kept in Ray's object store: one copy a node. Of data
that are read a batch at a time, the store has the sources, which read in each trial. Trials share data unless an option
is varied on which the data may depend, which its role says. A job whose ``environments`` reads another option, such as
the learning rate, has no shared data.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import ray
import torch
from ray.tune import Trainable
from torch import Tensor
from torch.utils import _pytree as pytree

from concord import logs
from concord.environments import Environment, Environments, HeldOut
from concord.environments.collection import held_out_places
from concord.environments.source import ConcatSource, InMemory, joined
from concord.environments.tree import merged
from concord.errors import InputError, RunFailedError, TrainingFailedError, format_for_cli
from concord.execution import local_ray
from concord.execution.execute import RunTask, execute
from concord.execution.session import wait_for_resources, waiting_minutes
from concord.options import OptionGroup, Role, option_values, options_of
from concord.record import Evaluation
from concord.redaction import redact
from concord.source_file import reason
from concord.storage import apply_credentials
from concord.studies.criterion import TrialEvaluator
from concord.studies.study_options import SharingOptions
from concord.training import Job, RunConfig, TrainConfig
from concord.training.checkpoint import RESUMED_SECONDS
from concord.training.context import ProcessContext
from concord.training.job import JobFile
from concord.training.options import device_of, parallel_of
from concord.training.process import tune_process
from concord.training.worker_data import WorkerData, prepare

# Schedulers see progress in per cent, so that trials of different lengths are comparable.
PROGRESS, SCORE = "percent", "score"
_logger = logging.getLogger("concord.studies")

Node = Mapping[str, float]


@dataclass(frozen=True)
class TrialResources:
    """The resources of trials.

    Attributes:
        cpus, gpus: of a trial's process.
    """

    concurrent: int
    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        """The number of threads of a trial's process."""
        return max(1, int(self.cpus))


def check_trial_resources(options: SharingOptions, config: RunConfig) -> None:
    """Refuse trials that do not fit (InputError), before Ray starts; not if they may wait for resources."""
    if waiting_minutes(config) == 0 and (nodes := _expected_nodes(config)):
        _divide(options, config, nodes)


def trial_resources(options: SharingOptions, config: RunConfig, info: Callable[[str], None]) -> TrialResources:
    """Divide the cluster among trials; wait until it holds ``--concurrent`` of them, by default one."""
    parallel, on_gpu = parallel_of(config), device_of(config) == "cuda"
    if parallel.workers > 1:
        trial = [{"GPU" if on_gpu else "CPU": 1.0}] * parallel.workers
    else:
        trial = [{"CPU": 1.0, **({"GPU": options.gpus_per_trial} if on_gpu else {})}]
    bundles = trial * max(1, options.concurrent)
    return wait_for_resources(lambda: _divide(options, config, _nodes()), bundles, config, info)


def _nodes() -> list[Node]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _expected_nodes(config: RunConfig) -> list[Node]:
    """The resources of the cluster's nodes, or this machine's if Ray would start here."""
    if ray.is_initialized():
        return _nodes()
    if config.run.address or os.environ.get("RAY_ADDRESS"):
        return []  # unknown until Ray is connected
    return [{"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}]


def _divide(options: SharingOptions, config: RunConfig, nodes: Sequence[Node]) -> TrialResources:
    """Divide these nodes among trials (InputError if they do not hold ``--concurrent`` of them)."""
    parallel, on_gpu = parallel_of(config), device_of(config) == "cuda"
    cores = [node.get("CPU", 0.0) for node in nodes]
    cpus, gpus = sum(cores), sum(node.get("GPU", 0.0) for node in nodes)
    if on_gpu and gpus == 0:
        raise InputError("--device cuda: the Ray cluster has no GPU")
    if parallel.workers > 1:  # the trial's process only waits for its workers
        most = int((gpus if on_gpu else max(cpus, parallel.workers)) // parallel.workers)
        what = f"{parallel.workers} workers each"
    elif on_gpu:
        whole = options.gpus_per_trial
        most = sum(_fitting(node.get("GPU", 0.0), whole) for node in nodes)
        most, what = min(most, int(cpus)), f"{whole:g} GPUs each"
    else:
        most, what = int(cpus), "a CPU each"
    if options.concurrent > most or most == 0:
        asked = options.concurrent or 1
        raise InputError(
            f"--concurrent {asked}: {asked} trials with {what} do not fit; the Ray cluster has {cpus:g} CPUs and "
            f"{gpus:g} GPUs, enough for {most}"
        )
    concurrent = options.concurrent or most
    if parallel.workers > 1:
        return TrialResources(concurrent, 0.0, 0.0)
    # A trial's process fits on one node.
    share = max(1.0, min(cpus // concurrent, max(cores, default=1.0)))
    while share > 1 and sum(count // share for count in cores) < concurrent:
        share -= 1
    return TrialResources(concurrent, share, options.gpus_per_trial if on_gpu else 0.0)


def _fitting(gpus: float, each: float) -> int:
    return int(gpus // each) if each >= 1 else int(gpus) * int(1 / each + 1e-9)


class _ReadsLearningError(Exception):
    """A job's data depend on an option of the training."""


class _Unreadable:
    """In place of a group of options on which data must not depend."""

    def __getattribute__(self, name: str) -> Any:
        raise _ReadsLearningError(name)


@dataclass(frozen=True)
class _Part:
    """Environments concatenated in one array a leaf, so that a trial's batches are views of it; or their sources."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    data: Any
    in_memory: bool


@dataclass(frozen=True)
class SharedData:
    """The data of a configuration, as references into the object store; made by :func:`share_data`.

    Attributes:
        options: the options on which the data may depend, with values.
        environments: names and purposes, without data.
        left_out: the environments that all runs leave out.
    """

    options: dict[str, Any]
    environments: Environments
    training: _Part
    held_out: _Part | None
    eval_only: _Part | None
    left_out: tuple[str, ...] = ()

    def fits(self, config: TrainConfig) -> bool:
        """Whether these are the data of this configuration, with or without the environments that it leaves out."""
        # What is left out changes what a table's encoder learns, and which environments are held out whole.
        depends = self.left_out or self.environments.learn or self.environments.held_out
        if config.data.left_out != self.left_out and depends:
            return False
        return self.options.items() <= option_values(config).items()

    def prepared(self) -> WorkerData:
        """The data without a copy; call it on the node that uses them."""
        training = _environments(self.training)
        held_out: Sequence[Environment | None] = (
            _environments(self.held_out) if self.held_out is not None else [None] * len(training)
        )
        eval_only = _environments(self.eval_only) if self.eval_only is not None else []
        pairs = [HeldOut(*pair) for pair in zip(training, held_out, strict=True)]
        return WorkerData(self.environments, pairs, [(environment.name, environment) for environment in eval_only])


def share_data(job: Job[Any], given: TrainConfig, varied: Collection[str]) -> SharedData | None:
    """Load the data into the object store.

    None if the data may depend on a varied option or cannot be sent: then each run loads its own.
    """
    config = given.resolve()
    depends = data_options(type(config))
    if not depends.isdisjoint(varied):
        return None
    learning: Any = {name: _Unreadable() for name in learning_groups(type(config))}
    guarded = dataclasses.replace(config, **learning)
    with_guard = dataclasses.replace(job, environments=lambda _: job.environments(guarded))
    try:
        prepared = prepare(with_guard, config, ProcessContext())
        held_out = [pair.held_out for pair in prepared.training if pair.held_out is not None]
        return SharedData(
            options={name: value for name, value in option_values(config).items() if name in depends},
            environments=prepared.environments,
            training=_put([pair.training for pair in prepared.training]),
            held_out=_put(held_out) if held_out else None,
            eval_only=_put([environment for _, environment in prepared.eval_only]) if prepared.eval_only else None,
            left_out=config.data.left_out,
        )
    except (_ReadsLearningError, TypeError, pickle.PicklingError):  # also a source with the options or an open file
        return None


def learning_groups(kind: type[TrainConfig]) -> frozenset[str]:
    """The groups of options on which data do not depend."""
    hints = get_type_hints(kind)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, OptionGroup)}
    return frozenset(name for name, group in groups.items() if group.role is Role.LEARNING)


def data_options(kind: type[TrainConfig]) -> frozenset[str]:
    """The options on which data may depend, besides the environments that are left out."""
    learning, roles = learning_groups(kind), (Role.SCIENCE, Role.SCORING)
    options = [each for each in options_of(kind).values() if each.role in roles and each.name != "leave_out"]
    return frozenset(each.name for each in options if not learning & {*each.groups})


def without(prepared: WorkerData, left_out: Sequence[str], fraction: float = 0.0, seed: int = 0) -> WorkerData:
    """The same data with some training environments turned into the only validation environments.

    Their held-out parts, of which ``fraction`` and ``seed`` decided, stand behind the others of their examples.
    """
    environments = prepared.environments.leaving_out(*left_out)
    rows: dict[str, Any] = {}
    validation: list[tuple[str, Environment]] = []
    for pair in (pair for pair in prepared.training if pair.training.name in left_out):
        name, sources = pair.training.name, [part.source for part in pair if part is not None]
        in_memory = [source for source in sources if isinstance(source, InMemory)]
        joint = merged([source.data for source in in_memory], torch.cat) if len(in_memory) == len(sources) else None
        whole = Environment(name, ConcatSource(sources) if joint is None else joint)
        kept, held = held_out_places(name, len(whole), fraction, seed)
        if kept is not None and held is not None:
            rows[name] = torch.cat([kept, held]).numpy()
        validation.append((name, whole))
    environments.rows = rows
    unchanged = {*environments.test, *environments.monitored}
    others = [(name, environment) for name, environment in prepared.eval_only if name in unchanged]
    training = [pair for pair in prepared.training if pair.training.name not in left_out]
    return WorkerData(environments, training, [*validation, *others])


def _put(environments: Sequence[Environment]) -> _Part:
    names, sizes = tuple(environment.name for environment in environments), tuple(map(len, environments))
    sources = [environment.source for environment in environments]
    in_memory = [source for source in sources if isinstance(source, InMemory)]
    if len(in_memory) < len(sources):
        return _Part(names, sizes, ray.put(sources), in_memory=False)
    data = merged([source.data for source in in_memory], lambda each: ray.put(_storable(joined(each))))
    return _Part(names, sizes, data, in_memory=True)


def _storable(values: Tensor) -> Any:
    """The tensor as an array, which Ray reads in place; types that numpy lacks (bfloat16) as bytes."""
    return values.numpy() if values.dtype != torch.bfloat16 else values.view(torch.int16).numpy().view("V2")


def _environments(part: _Part) -> list[Environment]:
    if not part.in_memory:
        return [Environment(*pair) for pair in zip(part.names, ray.get(part.data), strict=True)]
    references, structure = pytree.tree_flatten(part.data)
    leaves = [_tensor(array).split(part.sizes) for array in ray.get(references)]
    examples = [pytree.tree_unflatten(each, structure) for each in zip(*leaves, strict=True)]
    return [Environment(*pair) for pair in zip(part.names, examples, strict=True)]


def _tensor(array: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the store's memory is read-only; training only reads it
        if array.dtype.kind == "V":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array)


@dataclass(frozen=True)
class PoolSpec:
    """The common part of the runs of a pool.

    Attributes:
        task: with the base options, and the group's folder; the runs' folders are beside it.
        shared: the shared data; None if each run loads its own.
    """

    task: RunTask
    evaluator: TrialEvaluator
    shared: SharedData | None
    threads: int


class TrialProcess(Trainable):
    """Ray Tune's side of a run: ``step`` trains up to the next evaluation, and gives the events of the run's record."""

    def setup(self, config: dict[str, Any], pool: PoolSpec) -> None:  # type: ignore[override]
        """Prepare the process, once."""
        self._pool = pool
        # At once: Ray's handler raises SystemExit, which would be taken for a job's own, and recorded as its failure.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        local_ray.receive_sigterm()
        apply_credentials(pool.task.storage_credentials)
        self._prepared: WorkerData | None = None
        tune_process(pool.threads, pool.task.threads)
        here = ray.get_runtime_context()
        logs.inherit_context(pool.task.log_context, worker_id=here.get_worker_id(), node_id=here.get_node_id())
        self._begin(config)

    @functools.cached_property
    def _job(self) -> JobFile:
        return self._pool.task.sent.load()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare for the next run in the same process."""
        self._steps.close()  # the run may have been stopped by a scheduler
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        """Ray Tune is done with this process."""
        self._steps.close()

    def _begin(self, asked: dict[str, Any]) -> None:
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._steps = self._training(asked)

    def _take(self, name: str, /, **fields: Any) -> None:
        """The sink: steps are too many to keep of each of a group's runs."""
        if name != "metrics" or RESUMED_SECONDS in fields["metrics"]:
            self._events.append((name, fields))

    def step(self) -> dict[str, Any]:
        """Train up to the next evaluation."""
        result: dict[str, Any]
        try:
            result = next(self._steps)
        except TrainingFailedError as error:
            result = _failed(error.reason)
        except (InputError, RunFailedError) as error:
            result = _failed(format_for_cli(error))
        except (Exception, SystemExit) as error:  # the job's own code
            result = _failed(reason(error, self._pool.task.path))
        events, self._events = self._events, []
        # Events as text: Ray Tune would keep statistics of every number in a result. It also marks a trial that a
        # scheduler stops as done.
        return {"stopped": None, "failure": None, **result, "ended": result["done"], "events": json.dumps(events)}

    def _training(self, asked: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The results of a run, of which the last is done."""
        evaluator, base = self._pool.evaluator, self._pool.task
        folder = dataclasses.replace(base.folder, place=base.folder.place.parent.parent / "runs" / asked["folder"])
        task = dataclasses.replace(base, options=base.options | asked["options"], folder=folder)
        config: Any = task.config(self._job)
        config.check()
        # The process of a trial is a Ray worker, so --address has no effect on where it trains.
        alone = parallel_of(config).workers == 1
        if not alone:
            assert base.scratch is not None
            task = dataclasses.replace(
                task, on_ray_train=True, scratch=base.scratch / f"{self.trial_id}-{time.monotonic_ns()}"
            )
        shared = self._pool.shared
        load = functools.partial(self._shared, config) if shared is not None and shared.fits(config) else None
        epochs, last = self._job.epochs(config), None
        for percent, score in asked["earlier"]:  # a scheduler judges a continued run by all its evaluations
            yield {PROGRESS: percent, SCORE: score, "done": False}
        evaluations = self._evaluations(task, asked["start"], load)
        for evaluation in evaluations:
            metrics = evaluator.metrics(evaluation.metrics)
            stopped = None
            if asked["stop_when"] and evaluator.stop_rule.holds(metrics):
                stopped = str(evaluator.stop_rule)
            done = stopped is not None or evaluation.ended_early or evaluation.epoch == epochs
            score = evaluator.score(evaluation.metrics)
            if done:
                if alone and (stopped is not None or score < asked["keep_above"]):
                    evaluations.close()  # before its last checkpoint, which nothing would read
                for _ in evaluations:  # to the end, where its workers exit on their own
                    if stopped is not None:
                        evaluations.close()
                if evaluation.ended_early and stopped is None:
                    stopped = config.schedule.early_end
            last = {PROGRESS: 100 * evaluation.epoch / epochs, SCORE: score, "stopped": stopped, "done": done}
            yield last
            if done:
                return
        if last is None and not any(name == "evaluated" for name, _ in self._events) and asked["start"] is None:
            raise TrainingFailedError(f"the loop of job {self._job.name} gave no evaluation")
        # The loop ended before its last epoch, or the run had trained to its end.
        yield {**(last or {SCORE: 0.0}), PROGRESS: 100.0, "done": True}

    def _evaluations(
        self, task: RunTask, start: str | None, load: Callable[[], WorkerData] | None
    ) -> Generator[Evaluation, None, None]:
        """From a checkpoint on; from the beginning if there is none, or one that cannot be loaded."""
        loaded = False
        try:
            with contextlib.closing(execute(task, self._job, self._take, start, load)) as evaluations:
                for evaluation in evaluations:
                    loaded = True
                    yield evaluation
        except (InputError, RunFailedError, TrainingFailedError) as error:
            if loaded or start is None:
                raise
            _logger.warning("the run begins again: %s", format_for_cli(error))
            self._take("began", resumed=False)
            yield from execute(task, self._job, self._take, None, load)

    def _shared(self, config: TrainConfig) -> WorkerData:
        shared, left_out = self._pool.shared, config.data.left_out
        assert shared is not None
        if self._prepared is None:
            self._prepared = shared.prepared()
        if left_out in (shared.left_out, ()):
            return self._prepared
        return without(self._prepared, left_out, config.data.held_out, config.run.seed)


def _failed(why: str) -> dict[str, Any]:
    # At 0 % no scheduler compares its score.
    return {PROGRESS: 0.0, SCORE: 0.0, "failure": redact(why), "done": True}
