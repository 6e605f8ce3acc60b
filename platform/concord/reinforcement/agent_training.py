"""The loop of ``concord train coinrun-expert``: RLlib trains an agent, which is evaluated on unseen levels."""

import contextlib
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from concord.errors import CheckpointError, TrainingFailedError, first_line
from concord.extras import require_extra
from concord.machine import machine
from concord.record import Evaluation
from concord.redaction import redact_words
from concord.reinforcement.actor_critic import ActorCritic, Policy
from concord.reinforcement.agent_options import AgentConfig
from concord.reinforcement.episodes import play
from concord.reinforcement.expert import Expert, load_expert, save_expert
from concord.reinforcement.games import FIRST_UNSEEN_LEVEL, LARGEST_LEVEL
from concord.reinforcement.state_files import read_state, write_state
from concord.training.checkpoint import MODEL, PROGRESS, Progress
from concord.training.context import RunContext
from concord.training.job import Loop

if TYPE_CHECKING:
    from concord.reinforcement.procgen_environment import ProcgenVectorEnv

EXPERT = "expert.safetensors"
_LATE_EPISODES = 200


@dataclass
class AgentProgress:
    """The progress of an agent's training.

    Attributes:
        steps: number of environment steps.
        seconds: duration of the training.
        returns: steps and mean return of the latest episodes, after each batch.
        late: the returns of the latest episodes.
        history: the evaluations so far.
        written: time of the checkpoint, in seconds since 1970.
    """

    steps: int = 0
    seconds: float = 0.0
    returns: list[tuple[int, float]] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    history: list[Evaluation] = field(default_factory=list)
    written: float = 0.0


def train_agent(config: AgentConfig, context: RunContext) -> Iterator[Evaluation]:
    """Train an agent from random weights, from an expert, or from a checkpoint, with new episodes.

    Evaluations use the weights that are kept: rounded as in an expert's file.
    """
    from concord.reinforcement.policy_optimization import build_algorithm  # RLlib takes seconds to import

    initial = initial_expert(config)
    progress, state = (AgentProgress(), None) if context.start is None else read_training_state(context.start)
    algorithm = build_algorithm(config, progress.steps)
    try:
        if state is not None:
            algorithm.set_training_state(state)
            place = Progress(int(_epochs(config, progress.steps)), written=progress.written)
            context.log(place.resumed(workers=1), progress.steps)
        elif initial is not None:
            algorithm.set_weights_of_network({k: v.numpy() for k, v in initial.network.state_dict().items()})
        began = time.perf_counter() - progress.seconds
        while progress.steps < config.steps:
            before = progress.steps
            metrics = _learn(algorithm, progress)
            progress.seconds = time.perf_counter() - began
            context.log(metrics | {"epoch": _epochs(config, progress.steps)}, progress.steps)
            if progress.steps < config.steps and _passed(before, progress.steps, config.steps, config.evaluations):
                yield _evaluate(_policy(algorithm), config, progress, config.evaluation_episodes)
            if _passed(before, progress.steps, config.steps, config.checkpoints):
                context.checkpoint(lambda folder: write_training_state(folder, algorithm, progress), progress.steps)
        policy = _policy(algorithm)
    finally:
        algorithm.stop()
    evaluation = _evaluate(policy, config, progress, config.final_episodes)
    provenance = _provenance(config, progress, initial.provenance if initial is not None else None)
    context.keep(EXPERT, lambda path: save_expert(path, policy.network, provenance))
    context.keep("figures/return.png", lambda path: _draw_returns(progress, path))
    context.keep("figures/episode.gif", lambda path: _record_episode(policy, config, path))
    yield evaluation


def _learn(algorithm: Any, progress: AgentProgress) -> dict[str, float]:
    """Sample a batch and learn from it; return its metrics."""
    from ray.exceptions import RayTaskError

    began = time.perf_counter()
    try:
        learned = algorithm.step_batch(progress.steps)
    except RayTaskError as error:
        cause = error.cause or error
        raise TrainingFailedError(f"{type(cause).__name__}: {first_line(cause)}") from error
    progress.steps += algorithm.batch_steps
    progress.late = (progress.late + algorithm.returns)[-_LATE_EPISODES:]
    metrics: dict[str, float] = {
        name: learned[name] for name in ("policy_loss", "vf_loss", "entropy") if name in learned
    }
    metrics["steps_per_second"] = algorithm.batch_steps / (time.perf_counter() - began)
    if progress.late:
        metrics["train_return"] = float(np.mean(progress.late))
        progress.returns.append((progress.steps, metrics["train_return"]))
    return metrics


def _passed(before: int, now: int, whole: int, times: int) -> bool:
    """Whether one of ``times`` evenly spaced marks lies in (before, now]; the last mark is the end."""
    return now >= whole or now * times // whole > before * times // whole


def _epochs(config: AgentConfig, steps: int) -> float:
    """The progress of a run in epochs, which are its evaluations."""
    return min(config.evaluations * steps / config.steps, float(config.evaluations))


def _policy(algorithm: Any) -> Policy:
    """The present policy on the CPU, with weights rounded as in an expert's file."""
    # Its first weights are replaced, and must not change later random numbers.
    with torch.random.fork_rng(devices=[]):
        network = ActorCritic()
    network.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in algorithm.weights().items()})
    return Policy(network.half().float()).eval()


def unseen_levels(config: AgentConfig, environments: int, seed: int, **options: Any) -> "ProcgenVectorEnv":
    """The levels that training never plays."""
    from concord.reinforcement.procgen_environment import ProcgenVectorEnv

    levels = LARGEST_LEVEL - FIRST_UNSEEN_LEVEL
    of_game: dict[str, Any] = {"levels": levels, "first_level": FIRST_UNSEEN_LEVEL, "difficulty": config.difficulty}
    return ProcgenVectorEnv(environments, config.game, seed=seed, **of_game, **options)


def _evaluate(policy: Policy, config: AgentConfig, progress: AgentProgress, episodes: int) -> Evaluation:
    with contextlib.closing(unseen_levels(config, min(episodes, 64), seed=1)) as environment:
        played = play(policy, environment, episodes)
    metrics = {
        "unseen_return": played.mean,
        "unseen_return_error": played.standard_error,
        "steps": float(progress.steps),
    }
    if progress.returns:
        metrics["train_return"] = progress.returns[-1][1]
    progress.history.append(Evaluation(int(_epochs(config, progress.steps)), progress.steps, metrics))
    return progress.history[-1]


def write_training_state(folder: Path, algorithm: Any, progress: AgentProgress) -> None:
    """Write the state of the training, and the weights of the registered model."""
    write_state(folder, algorithm.training_state())
    progress.written = time.time()
    weights = _policy(algorithm).state_dict()
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / MODEL)
    (folder / PROGRESS).write_text(json.dumps(dataclasses.asdict(progress)))


def read_training_state(folder: Path) -> tuple[AgentProgress, Any]:
    """The progress in a checkpoint, and RLlib's state."""
    try:
        progress = AgentProgress(**json.loads((folder / PROGRESS).read_text()))
        progress.history = [Evaluation(*each) for each in progress.history]
        return progress, read_state(folder)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {folder}: cannot be read ({first_line(error)})") from error


def initial_expert(config: AgentConfig) -> Expert | None:
    """The expert that ``--initial`` names (InputError if it cannot be used); None if it was not given."""
    return load_expert(config.initial, config.game, config.difficulty, "initial") if config.initial else None


def _provenance(config: AgentConfig, progress: AgentProgress, initial: Mapping[str, Any] | None) -> dict[str, Any]:
    """The provenance of an expert: its game, training, machine and returns."""
    command = shlex.join(["concord", *redact_words(sys.argv[1:])]) if Path(sys.argv[0]).name == "concord" else None
    final = progress.history[-1].metrics
    return {
        "game": config.game,
        "difficulty": config.difficulty,
        "steps": progress.steps + (initial.get("steps", 0) if initial else 0),
        "seconds": round(progress.seconds),
        "command": command,
        "hardware": machine(),
        "unseen_return": round(final["unseen_return"], 3),
        "standard_error": round(final["unseen_return_error"], 3),
        "episodes": config.final_episodes,
        **({"initial": dict(initial)} if initial else {}),
    }


def _draw_returns(progress: AgentProgress, path: Path) -> None:
    from concord.analysis.agent_figures import return_curve
    from concord.analysis.figures import save

    unseen = [(at.step, at.metrics["unseen_return"], at.metrics["unseen_return_error"]) for at in progress.history]
    save(return_curve(progress.returns, unseen), path)


def _record_episode(policy: Policy, config: AgentConfig, path: Path) -> None:
    from concord.analysis.agent_figures import write_video

    with contextlib.closing(unseen_levels(config, 1, seed=2, render_mode="rgb_array")) as environment:
        write_video(policy, environment, path)


def _opening(config: AgentConfig) -> tuple[str, str]:
    what = f"{config.game}, {config.difficulty}, {config.steps:,} steps"
    return what, f"data: {config.levels:,} levels for training, levels from {FIRST_UNSEEN_LEVEL:,} on for evaluation"


def _check(config: AgentConfig) -> None:
    initial_expert(config)
    require_extra("coinrun", "an agent")


def _check_trial(config: AgentConfig) -> None:
    for option in ("runners", "learners", "gpus_per_learner"):
        own = getattr(config, option) == 0
        config.require(option, own, "a trial samples and learns in its own process, on CPUs; give 0")


# An evaluation counts as an epoch. The scores are returns on levels that training never plays.
AGENT_LOOP = Loop(
    train_agent,
    epochs=lambda config: config.evaluations,
    metrics={"unseen_return": "max", "train_return": "max", "unseen_return_error": None, "steps": None},
    check=_check,
    check_trial=_check_trial,
    example=lambda _: torch.zeros(2, 64, 64, 3, dtype=torch.uint8),
    model_name=lambda config: f"coinrun-expert-{config.game}-{config.difficulty}",
    opening=_opening,
    uses_ray=True,
)
