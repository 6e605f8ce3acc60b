"""The options of an agent's training."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from concord.errors import InputError
from concord.options import Place, Scoring
from concord.reinforcement.games import FIRST_UNSEEN_LEVEL, Difficulty, check_game
from concord.training.options import RunConfig


@dataclass(frozen=True, kw_only=True)
class AgentConfig(RunConfig):
    """One agent; the defaults are the settings that Procgen's authors publish (Cobbe et al., 2020, appendix D).

    Unlike in their code the value function is not clipped, and advantages are normalized over a batch, not a minibatch.
    """

    # fmt: off
    game: str = "coinrun"
    """One of Procgen's 16 games."""
    difficulty: Difficulty = "easy"
    """Distribution of levels: easy or hard."""
    levels: int = FIRST_UNSEEN_LEVEL
    """Number of training levels, from level 0 on; levels from 2,000,000,000 on are for evaluation."""
    steps: int = 25_000_000
    """Environment steps of the whole run, over all environments."""

    environments: int = 64
    """Number of environments of each runner, stepped together."""
    rollout: int = 256
    """Steps of each environment between updates."""
    epochs: int = 3
    """Passes over each batch."""
    minibatches: int = 8
    """Optimizer steps of a pass."""
    lr: float = 5e-4
    """Learning rate of Adam."""
    final_lr: float | None = None
    """Learning rate at the end of the run, approached linearly; by default the rate is constant."""
    discount: float = 0.999
    """Discount factor γ."""
    gae_lambda: float = 0.95
    """λ of the generalized advantage estimates."""
    clip: float = 0.2
    """PPO's clip: distance from 1 at which the ratio of new to old policy is clipped."""
    entropy: float = 0.01
    """Coefficient of the policy's entropy."""
    value: float = 0.25
    """Coefficient of the squared error of the value function (0.25 equals the authors' 0.5 of half the error)."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""

    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the network (autocast)."""
    compile: Place[bool] = False
    """Compile the network (torch.compile)."""
    overlap: Place[bool] = True
    """Sample the next batch while the present one is learned, if --runners is above 0."""
    runners: int = 0
    """Number of processes that sample; 0 samples in the learner's process."""
    learners: Place[int] = 0
    """Number of processes that learn, placed by Ray; 0 learns in the command's process."""
    gpus_per_learner: Place[float] = 0.0
    """GPUs of each learner; needs --learners 1 or more on a cluster."""
    gpus_per_runner: Place[float] = 0.0
    """GPUs of each runner."""
    threads: Place[int | None] = None
    """Number of PyTorch's threads in the learner; by default the number of cores without a runner."""

    initial: Path | None = None
    """Safetensors file of an expert to begin from; by default random weights."""
    evaluations: Scoring[int] = 10
    """Number of evaluations during the run, with one at the end."""
    evaluation_episodes: int = 100
    """Number of episodes of an evaluation during the run."""
    final_episodes: int = 500
    """Number of episodes of the evaluation at the end."""
    checkpoints: Place[int] = 50
    """Number of checkpoints during the run, with one at the end."""
    # fmt: on

    @property
    def method(self) -> str:
        """The game."""
        return self.game

    def unused(self) -> frozenset[str]:
        """Also the options of runners if there are no runners."""
        of_runners = frozenset({"overlap", "gpus_per_runner"})
        return super().unused() | (of_runners if self.runners == 0 else frozenset())

    def gpu_request(self) -> tuple[float, str]:
        """The GPUs of all learners and runners, and their options."""
        wanted = max(self.learners, 1) * self.gpus_per_learner + self.runners * self.gpus_per_runner
        of_each = f"--gpus-per-learner {self.gpus_per_learner:g} --gpus-per-runner {self.gpus_per_runner:g}"
        return wanted, f"{of_each}: {wanted:g} GPUs in all"

    def cpu_request(self) -> tuple[float, str]:
        """One CPU for each runner and learner."""
        wanted = self.runners + self.learners
        return wanted, f"--runners {self.runners} --learners {self.learners}: they need a CPU each, {wanted} in all"

    @property
    def batch(self) -> int:
        """Environment steps between updates."""
        return self.environments * self.rollout * max(1, self.runners)

    def check(self) -> None:
        """Validate options."""
        super().check()
        check_game(self.game, self.difficulty)
        positive = ("steps", "environments", "rollout", "epochs", "minibatches", "evaluations", "evaluation_episodes")
        self.require_at_least(1, *positive, "final_episodes", "checkpoints")
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
        self.require_at_least(0, "final_lr")
        self.require_at_least(1, "threads")
        alone = self.gpus_per_runner == 0 or self.runners > 0
        self.require("gpus_per_runner", alone, "needs --runners; without, sampling is where the learner is")
        if self.gpus_per_learner > 0 and self.learners == 0 and not torch.cuda.is_available():
            raise InputError(
                f"--gpus-per-learner {self.gpus_per_learner:g}: there is no GPU here; --learners 1 finds one elsewhere"
            )
