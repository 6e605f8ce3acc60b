"""The run behind ``concord train coinrun-expert``: an agent trained by RLlib, tracked, evaluated, registered."""

import contextlib
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from concord.errors import InputError, RunFailedError
from concord.machine import machine
from concord.redaction import redact_words
from concord.reinforcement.actor_critic import ActorCritic
from concord.reinforcement.episodes import Played, play, policy_of
from concord.reinforcement.expert import Expert, load_expert, save_expert
from concord.reinforcement.extra import require_coinrun
from concord.reinforcement.procgen_environment import (
    FIRST_UNSEEN_LEVEL,
    LARGEST_LEVEL,
    Difficulty,
    ProcgenVectorEnv,
    check_game,
)
from concord.runs.cluster_address import check_cluster
from concord.runs.dashboard import described
from concord.runs.folder import RunFolder
from concord.runs.lifecycle import reserved_run, run_lifecycle
from concord.runs.opening import opening_lines
from concord.runs.resources import require_resources
from concord.runs.run import FinishedRun, Info, already_finished, resolved_paths, send_unsent
from concord.runs.session import ray_session
from concord.runs.tags import run_tags
from concord.runs.worker import METRICS
from concord.storage import Folder, full_disk_in_one_line, require_space
from concord.tracking import MetricLog, Registered, log_model, register
from concord.training.job import JobFile
from concord.training.options import RunConfig
from concord.training.process import own_cores

EXPERT = "expert.safetensors"
CRITERION: tuple[str, Literal["max"]] = "unseen_return", "max"  # of the champion
_CHECKPOINTS = "checkpoints"
_LATE_EPISODES = 200
_MODULE = "default_policy"
_SENDING_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class AgentConfig(RunConfig):
    """One agent; the defaults are the settings that Procgen's authors publish (Cobbe et al., 2020, appendix D).

    Unlike in their code the value function is not clipped, and advantages are normalized over a batch, not a minibatch.
    """

    # fmt: off
    game: str = "coinrun"
    """Which of Procgen's 16 games."""
    difficulty: Difficulty = "easy"
    """Distribution of levels: easy or hard."""
    levels: int = FIRST_UNSEEN_LEVEL
    """How many levels there are to train on, from level 0 on; those from 2,000,000,000 on are for evaluation."""
    steps: int = 25_000_000
    """Environment steps of the whole run, over all environments."""

    environments: int = 64
    """Environments of each runner, stepped together."""
    rollout: int = 256
    """Steps of each environment between updates."""
    epochs: int = 3
    """Passes over what was sampled."""
    minibatches: int = 8
    """Steps of the optimizer, a pass."""
    lr: float = 5e-4
    """Learning rate of Adam."""
    final_lr: float | None = None
    """Learning rate at the end, to which it goes in a straight line; constant if not given."""
    discount: float = 0.999
    """Discount factor γ."""
    gae_lambda: float = 0.95
    """λ of the generalized advantage estimates."""
    clip: float = 0.2
    """How far the ratio of new to old policy may be from 1 before its gain counts no more."""
    entropy: float = 0.01
    """Coefficient of the policy's entropy."""
    value: float = 0.25
    """Coefficient of the squared error of the value function (theirs is 0.5 of half of it)."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""

    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """What the network computes in (autocast)."""
    compile: bool = False
    """Compile the network (torch.compile)."""
    overlap: bool = True
    """Sample the next batch while learning from this one, where --runners is above 0."""
    runners: int = 0
    """Processes that sample; 0 samples where the learner is."""
    learners: int = 0
    """Processes that learn, placed by Ray; 0 learns in this one."""
    gpus_per_learner: float = 0.0
    """GPUs of each learner; needs --learners 1 or more on a cluster."""
    gpus_per_runner: float = 0.0
    """GPUs of each runner."""
    threads: int | None = None
    """PyTorch's threads in the learner; one for each core that no runner takes, if not given."""

    initial: Path | None = None
    """Expert to begin from, a safetensors file; random weights if not given."""
    evaluations: int = 10
    """How often the agent is evaluated during the run (at the end in any case)."""
    evaluation_episodes: int = 100
    """Episodes of an evaluation during the run."""
    final_episodes: int = 500
    """Episodes of the evaluation at the end."""
    checkpoints: int = 50
    """How many checkpoints are written during the run (at the end in any case)."""
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The options of runners where there are none."""
        of_runners = frozenset({"overlap", "gpus_per_runner"})
        return super().unused() | (of_runners if self.runners == 0 else frozenset())

    def gpu_request(self) -> tuple[float, str]:
        """Of all learners and runners."""
        wanted = max(self.learners, 1) * self.gpus_per_learner + self.runners * self.gpus_per_runner
        of_each = f"--gpus-per-learner {self.gpus_per_learner:g} --gpus-per-runner {self.gpus_per_runner:g}"
        return wanted, f"{of_each}: {wanted:g} GPUs in all"

    def cpu_request(self) -> tuple[float, str]:
        """One for each runner and learner."""
        wanted = self.runners + self.learners
        return wanted, f"--runners {self.runners} --learners {self.learners}: they want a CPU each, {wanted} in all"

    @property
    def batch(self) -> int:
        """Environment steps between updates."""
        return self.environments * self.rollout * max(1, self.runners)

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        super().check()
        check_game(self.game, self.difficulty)
        positive = ("steps", "environments", "rollout", "epochs", "minibatches", "evaluations", "evaluation_episodes")
        for option in (*positive, "final_episodes", "checkpoints"):
            self.require(option, getattr(self, option) >= 1, "must be at least 1")
        for option in ("runners", "learners", "gpus_per_learner", "gpus_per_runner", "clip", "entropy", "value"):
            right = 0 <= getattr(self, option) < math.inf
            self.require(option, right, "must be a finite number, not negative")
        right = 1 <= self.levels <= FIRST_UNSEEN_LEVEL
        self.require("levels", right, f"must lie in [1, {FIRST_UNSEEN_LEVEL}]; the others are for evaluation")
        rows = self.batch // max(1, self.learners)
        self.require("minibatches", self.minibatches <= rows, f"more than the {rows} steps of a batch")
        self.require("steps", self.steps >= self.batch, f"less than one batch, {self.batch} steps")
        for option in ("discount", "gae_lambda"):
            self.require(option, 0 <= getattr(self, option) <= 1, "must lie in [0, 1]")
        for option in ("lr", "max_grad_norm"):
            self.require(option, 0 < getattr(self, option) < math.inf, "must be a finite number above 0")
        self.require("final_lr", self.final_lr is None or self.final_lr >= 0, "must not be negative")
        self.require("threads", self.threads is None or self.threads >= 1, "must be at least 1")
        alone = self.gpus_per_runner == 0 or self.runners > 0
        self.require("gpus_per_runner", alone, "needs --runners; without, sampling is where the learner is")
        if self.gpus_per_learner > 0 and self.learners == 0 and not torch.cuda.is_available():
            raise InputError(
                f"--gpus-per-learner {self.gpus_per_learner:g}: there is no GPU here; --learners 1 finds one elsewhere"
            )


PLACEMENT = frozenset(
    {
        "name", "address", "wait_for_resources", "output", "resume", "tracking_uri", "register",
        "overlap", "learners", "gpus_per_learner", "gpus_per_runner", "threads", "compile",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on levels that training never plays.

    Attributes:
        steps: environment steps done.
        mean, error: the mean return and its standard error.
        episodes: how many.
    """

    steps: int
    mean: float
    error: float
    episodes: int


@dataclass
class Progress:
    """How far an agent is.

    Attributes:
        steps: of its environments.
        seconds: of its training.
        returns: steps and mean return of the latest episodes, after each batch.
        evaluations: so far.
        late: the returns of those episodes.
    """

    steps: int = 0
    seconds: float = 0.0
    returns: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    late: list[float] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """What is said of the agent after an evaluation."""
        latest = self.evaluations[-1]
        metrics = {"unseen_return": latest.mean, "unseen_return_error": latest.error, "steps": float(self.steps)}
        return metrics | ({"train_return": self.returns[-1][1]} if self.returns else {})


def train_agent(job: JobFile, config: AgentConfig, info: Info) -> FinishedRun:
    """Train an agent from nothing, from an expert, or from where the run stopped, and keep everything.

    Args:
        job: the job with its file.
        config: the options.
        info: takes a line of progress.

    Raises:
        InputError: something given cannot be used; nothing of the run is left.
        RunFailedError: training failed; ``--resume`` goes on from the last checkpoint.
    """
    started = time.perf_counter()
    config.check()
    config = config.with_options(**resolved_paths(config))
    check_cluster(config)
    initial = initial_expert(config)
    require_coinrun(f"job {job.name}")
    with reserved_run(job.name, config, config.game, placement=PLACEMENT, defaults=job.job.config) as reserved:
        if reserved.report is not None:
            return already_finished(reserved, reserved.report, info)
        config = config.with_options(name=reserved.name)
        with ray_session(config) as dashboard:
            require_resources(config, info)
            with (
                full_disk_in_one_line(reserved.folder.path),
                run_lifecycle(reserved, run_tags(job.name, job.path)) as opened,
            ):
                what = f"{config.game}, {config.difficulty}, {config.steps:,} steps"
                unseen = f"levels from {FIRST_UNSEEN_LEVEL:,} on for evaluation"
                data = f"{config.levels:,} levels for training, {unseen}"
                for line in opening_lines(opened, what, data, CRITERION if config.run.register else None):
                    info(line)
                if dashboard:
                    info(f"Ray dashboard {described(dashboard)}")
                report = _trained(job, config, opened, initial, info)
                report = dataclasses.replace(report, seconds=time.perf_counter() - started)
                if report.model is not None:  # otherwise --resume has still to keep it
                    opened.record(report=report.as_json())
    return report


def initial_expert(config: AgentConfig) -> Expert | None:
    """What ``--initial`` names (InputError if it cannot be used); None if it was not given."""
    return load_expert(config.initial, config.game, config.difficulty, "initial") if config.initial else None


def _trained(job: JobFile, config: AgentConfig, opened: RunFolder, initial: Expert | None, info: Info) -> FinishedRun:
    opened.kept.fetch(_CHECKPOINTS)
    for partial in (opened.folder / _CHECKPOINTS).glob("*.new"):  # being written when the process was killed
        partial.unlink()
    kept = _last_checkpoint(opened.folder, info)
    if kept is not None:
        info(f"going on from {kept.progress.steps:,} steps, with new episodes")
    start = kept.journal_length if kept else 0
    log = MetricLog.going_on(opened.kept.lines(METRICS), opened.store.uri, opened.run_id, start)
    threads = config.threads or max(1, own_cores() - config.runners)
    try:
        network = initial.network if initial else None
        with _one_line_failures(), contextlib.closing(Agent(config, threads, kept, network)) as agent:
            _learn(agent, config, log, opened.kept, info)
            network, progress = agent.network(), agent.progress
    finally:
        unsent = log.close(_SENDING_SECONDS)
    network = evaluated_at_end(network, config, progress)
    final = progress.evaluations[-1]
    info(f"return on unseen levels {final.mean:.2f} ± {final.error:.2f} ({final.episodes} episodes)")
    save_expert(opened.folder / EXPERT, network, _provenance(config, progress, initial.provenance if initial else None))
    report = _keep(job, config, opened, network, progress, info)
    # The store may have come back meanwhile: what has taken the model takes the metrics, too.
    if unsent and report.model is not None:
        unsent = send_unsent(opened.kept, opened.store.uri, opened.run_id)
    if unsent:
        info(f"{unsent} metrics could not be sent; --name {opened.name} --resume sends them")
    return report


@contextlib.contextmanager
def _one_line_failures() -> Iterator[None]:
    """What goes wrong in Ray's processes, in one line."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        raise RunFailedError(f"training failed: {lines[-1] if lines else type(cause).__name__}") from error


class Agent:
    """An agent that learns, as far as it is; it keeps nothing.

    Args:
        config: the options.
        threads: PyTorch's in the learner; None leaves them as they are.
        kept: a checkpoint to go on from.
        initial: weights to begin with where there is no checkpoint; None draws them.
    """

    def __init__(
        self,
        config: AgentConfig,
        threads: int | None,
        kept: "_Kept | None" = None,
        initial: nn.Module | None = None,
    ) -> None:
        # RLlib takes seconds to import.
        from concord.reinforcement.policy_optimization import Placement, algorithm_config

        self._config = config
        self.progress = kept.progress if kept else Progress()
        self._algorithm: Any = algorithm_config(
            environments=config.environments,
            steps=config.rollout,
            epochs=config.epochs,
            minibatches=config.minibatches,
            lr=config.lr if config.final_lr is None else [[0, config.lr], [config.steps, config.final_lr]],
            discount=config.discount,
            decay=config.gae_lambda,
            clip=config.clip,
            entropy=config.entropy,
            value=config.value,
            max_grad_norm=config.max_grad_norm,
            precision=config.precision,
            compiled=config.compile,
            overlap=config.overlap,
            seed=config.run.seed,
            game={"game": config.game, "difficulty": config.difficulty, "levels": config.levels},
            placement=Placement(
                runners=config.runners,
                learners=config.learners,
                gpus_per_learner=config.gpus_per_learner,
                gpus_per_runner=config.gpus_per_runner,
                threads=threads,
            ),
            begins_at=self.progress.steps,
        ).build_algo()
        if kept is not None:
            self._algorithm.set_training_state(kept.arrays, kept.counts)
        elif initial is not None:
            self._algorithm.set_weights_of_network(
                {name: value.numpy() for name, value in initial.state_dict().items()}
            )

    def batches(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Learn from batch after batch, to the end; gives the steps before each, and what is to be said of it."""
        config, progress = self._config, self.progress
        began = time.perf_counter() - progress.seconds
        late = progress.late
        while progress.steps < config.steps:
            before, batch_began = progress.steps, time.perf_counter()
            learned = self._algorithm.step_batch(progress.steps)
            progress.steps += self._algorithm.batch_steps
            progress.seconds = time.perf_counter() - began
            late[:] = (late + self._algorithm.returns.tolist())[-_LATE_EPISODES:]
            metrics = {name: learned[name] for name in ("policy_loss", "vf_loss", "entropy") if name in learned}
            metrics["steps_per_second"] = self._algorithm.batch_steps / (time.perf_counter() - batch_began)
            if late:
                metrics["train_return"] = float(np.mean(late))
                progress.returns.append((progress.steps, metrics["train_return"]))
            if _passed(before, progress.steps, config.steps, config.evaluations) and progress.steps < config.steps:
                evaluation = _evaluate(self.network(), config, config.evaluation_episodes, progress.steps)
                progress.evaluations.append(evaluation)
                metrics["unseen_return"] = evaluation.mean
            yield before, metrics

    def network(self) -> ActorCritic:
        """The agent's network as it is now, on the CPU, in evaluation mode."""
        network = ActorCritic()
        network.load_state_dict(
            {name: torch.from_numpy(value.copy()) for name, value in self._algorithm.weights().items()}
        )
        return network.eval()

    def training_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What training goes on from: arrays, and counts that JSON takes."""
        state: tuple[dict[str, Any], dict[str, Any]] = self._algorithm.training_state()
        return state

    def close(self) -> None:
        """End RLlib's processes."""
        self._algorithm.stop()


def _learn(agent: Agent, config: AgentConfig, log: MetricLog, folder: Folder, info: Info) -> None:
    """Batch after batch, to the end: logged, kept in checkpoints, said now and then."""
    progress, said = agent.progress, time.monotonic()
    for before, metrics in agent.batches():
        log.log(metrics, progress.steps)
        if _passed(before, progress.steps, config.steps, config.checkpoints):
            _keep_checkpoint(agent, log, folder)
        if time.monotonic() - said > 10:
            said = time.monotonic()
            shown = "  ".join(
                f"{key} {metrics[key]:.2f}" for key in ("train_return", "unseen_return") if key in metrics
            )
            info(f"{progress.steps:,}/{config.steps:,} steps  {metrics['steps_per_second']:.0f} a second  {shown}")


def _keep_checkpoint(agent: Agent, log: MetricLog, kept: Folder) -> None:
    """Weights, moments of Adam, and counts, in one safetensors file; this one and the one before are kept."""
    folder = kept.path / _CHECKPOINTS
    folder.mkdir(exist_ok=True)
    arrays, counts = agent.training_state()
    described = {
        "progress": dataclasses.asdict(agent.progress),
        "counts": counts,
        # Who goes on from here cuts the journal there, and logs what comes after it anew.
        "journal_length": log.keep(),
    }
    path = folder / f"checkpoint_{agent.progress.steps:012d}.safetensors"
    new = path.with_suffix(".new")
    require_space(folder, sum(value.nbytes for value in arrays.values()))
    try:
        save_file(
            {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()},
            new,
            {"run": json.dumps(described)},
        )
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    new.replace(path)
    kept.keep(f"{_CHECKPOINTS}/{path.name}")
    for old in sorted(folder.glob("checkpoint_*.safetensors"))[:-2]:
        kept.remove(f"{_CHECKPOINTS}/{old.name}")


@dataclass(frozen=True)
class _Kept:
    """A checkpoint: what training goes on from, how far it was, and how long the journal was, where it says so."""

    arrays: dict[str, Any]
    counts: dict[str, Any]
    progress: Progress
    journal_length: int | None


def _last_checkpoint(folder: Path, info: Info) -> _Kept | None:
    """The newest that can be read; one that was being written when the machine died is passed over."""
    for path in sorted((folder / _CHECKPOINTS).glob("checkpoint_*.safetensors"), reverse=True):
        try:
            with safe_open(path, "np") as file:
                described = json.loads(file.metadata()["run"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            said = described["progress"]
            progress = Progress(
                said["steps"],
                said["seconds"],
                [(int(steps), float(mean)) for steps, mean in said["returns"]],
                [Evaluation(**evaluation) for evaluation in said["evaluations"]],
                said["late"],
            )
            return _Kept(arrays, described["counts"], progress, described.get("journal_length"))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            info(f"{path.name} cannot be read ({str(error).splitlines()[0]}); the one before is taken")
    return None


def _passed(before: int, now: int, whole: int, times: int) -> bool:
    """Whether one of ``times`` evenly spaced marks lies in (before, now]; the end is one."""
    return now >= whole or now * times // whole > before * times // whole


def unseen_levels(config: AgentConfig, environments: int, seed: int, **options: Any) -> ProcgenVectorEnv:
    """The levels that training never plays."""
    return ProcgenVectorEnv(
        environments,
        config.game,
        levels=LARGEST_LEVEL - FIRST_UNSEEN_LEVEL,
        first_level=FIRST_UNSEEN_LEVEL,
        difficulty=config.difficulty,
        seed=seed,
        **options,
    )


def _evaluate(network: ActorCritic, config: AgentConfig, episodes: int, steps: int) -> Evaluation:
    environment = unseen_levels(config, min(episodes, 64), seed=1)
    try:
        played: Played = play(policy_of(network), environment, episodes)
    finally:
        environment.close()
    return Evaluation(steps, played.mean, played.standard_error, episodes)


def evaluated_at_end(network: ActorCritic, config: AgentConfig, progress: Progress) -> ActorCritic:
    """Evaluate what is kept at the end: the network with its weights rounded as a file of an expert has them."""
    network = network.half().float()
    progress.evaluations.append(_evaluate(network, config, config.final_episodes, progress.steps))
    return network


def _provenance(config: AgentConfig, progress: Progress, initial: Any | None) -> dict[str, Any]:
    """What is to be known of an expert: what it plays, how it was trained, on what, and how well it plays."""
    final = progress.evaluations[-1] if progress.evaluations else None
    command = shlex.join(["concord", *redact_words(sys.argv[1:])]) if Path(sys.argv[0]).name == "concord" else None
    return {
        "game": config.game,
        "difficulty": config.difficulty,
        "steps": progress.steps + (initial.get("steps", 0) if initial else 0),
        "seconds": round(progress.seconds),
        "command": command,
        "hardware": machine(),
        **(
            {"unseen_return": round(final.mean, 3), "standard_error": round(final.error, 3), "episodes": final.episodes}
            if final
            else {}
        ),
        **({"initial": dict(initial)} if initial else {}),
    }


class _PolicyAlone(nn.Module):
    """Frames to logits, which is what is registered."""

    def __init__(self, network: ActorCritic) -> None:
        super().__init__()
        self.network = network

    def forward(self, frames: Tensor) -> Tensor:
        logits: Tensor = self.network(frames)[0]
        return logits


def _keep(
    job: JobFile, config: AgentConfig, opened: RunFolder, network: ActorCritic, progress: Progress, info: Info
) -> FinishedRun:
    from concord.analysis.agent_figures import return_curve, write_video
    from concord.analysis.figures import save

    store, run_id, folder = opened.store, opened.run_id, opened.folder
    metrics = progress.metrics
    (folder / "metrics.json").write_text(json.dumps(metrics | {"progress": dataclasses.asdict(progress)}, indent=1))
    evaluations = [(each.steps, each.mean, each.error) for each in progress.evaluations]
    figures = (save(return_curve(progress.returns, evaluations), folder / "figures" / "return.png"),)
    environment = unseen_levels(config, 1, seed=2, render_mode="rgb_array")
    try:
        video = write_video(policy_of(network), environment, folder / "figures" / "episode.gif")
    finally:
        environment.close()
    opened.kept.keep(EXPERT, "metrics.json", "figures")
    registered: Registered | None = None
    model: str | None = None
    try:
        store.log_metrics(run_id, metrics, progress.steps)
        for path in (*figures, video):
            store.log_files(run_id, path, "figures")
        store.log_files(run_id, folder / EXPERT)
        example = torch.zeros(2, 64, 64, 3, dtype=torch.uint8)
        uri = log_model(store, run_id, _PolicyAlone(network), example)
        name = f"{job.name}-{config.game}-{config.difficulty}"
        if config.run.register:
            registered = register(store, uri, run_id, name, metrics, *CRITERION)
        model = f"models:/{registered.name}/{registered.version}" if registered else uri
    except (RunFailedError, InputError) as error:
        info(f"the model could not be kept in MLflow, --resume tries again: {error}")
    try:
        store.finish_run(run_id, "FINISHED")
    except RunFailedError as error:
        info(f"the status could not be kept in MLflow, --resume tries again: {error}")
    return FinishedRun(
        job=job.name,
        name=opened.name,
        run_id=run_id,
        seconds=0.0,
        model=model,
        registered=registered,
        kept=opened.kept,
        figures=figures,
        metrics=metrics,
        tracking_uri=store.uri,
    )
