"""Adaptive skip intervals where the right skips are known: noise for 1 to 9 frames, and then a frame that is certain.

A sequence goes through a ring of random binary pictures, the exits, with 1 to 9 frames of noise between two exits. The
next frame is unpredictable, but the next exit is predictable, with one prediction. ``concord train skip-toy`` learns
these skips with a horizon of at least 10; ``--skip fixed`` must predict noise. Environments differ in the brightness of
the noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from concord.dynamics import SkipConfig, SkipOptions, as_float, rollout, sequences, skip_objective, unroll
from concord.dynamics.skip_figures import skip_figures
from concord.environments import Environment, Environments
from concord.environments.collection import generator_for
from concord.models import MLP
from concord.objectives import Objective
from concord.options import group
from concord.training import Comparison, EnvironmentEvaluation, Job, TrainConfig
from concord.training.declared_measures import Mode

MODES: Mapping[str, Mode | None] = {
    "right_skips": "max",
    "right_rollout": "max",
    "mean_skip": None,
    "predictions": None,
}


@dataclass(frozen=True, kw_only=True)
class ToyConfig(TrainConfig):
    """A ring of exits with noise between them."""

    # fmt: off
    skips: SkipOptions = group(SkipOptions)
    exits: int = 6
    """Number of exits of the ring."""
    side: int = 6
    """Height and width of a frame, in pixels."""
    passed: int = 8
    """Number of exits of a sequence after the first one."""
    examples: int = 64
    """Number of sequences of each environment."""
    brightness: tuple[float, ...] = (0.4, 0.6)
    """Probability of a bright pixel in the noise, for each training environment; validation and test have 0.5."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(1, "side", "passed", "examples")
        self.require("exits", self.exits >= 2, "must be at least 2")
        right = len(set(self.brightness)) == len(self.brightness) and all(0 <= each <= 1 for each in self.brightness)
        self.require("brightness", right and len(self.brightness) > 0, "give different probabilities, in [0, 1]")


def ring(config: ToyConfig) -> Tensor:
    """The exits, ``(exits, 1, side, side)`` uint8."""
    generator = generator_for(config.run.seed, "exits")
    return 255 * torch.randint(0, 2, (config.exits, 1, config.side, config.side), generator=generator).byte()


def environments(config: ToyConfig) -> Environments:
    """Sequences with the same exits; ``exit`` is the number of a frame's exit, -1 for noise."""
    names = {f"noise-{brightness:g}": brightness for brightness in config.brightness}
    exits, longest = ring(config), 10 * config.passed + 1

    def load(name: str) -> Mapping[str, Tensor]:
        generator = generator_for(config.run.seed, name)
        found, marks = [], []
        for _ in range(config.examples):
            dwell = torch.randint(2, 11, (config.passed,), generator=generator)
            mark = torch.full((int(dwell.sum()) + 1,), -1)
            first = int(torch.randint(config.exits, (), generator=generator))
            places = torch.cat([torch.zeros(1, dtype=torch.int64), dwell.cumsum(0)])
            mark[places] = (first + torch.arange(len(places))) % config.exits
            noise = torch.rand(len(mark), *exits.shape[1:], generator=generator) < names.get(name, 0.5)
            frames = 255 * noise.byte()
            frames[places] = exits[mark[places]]
            found.append(frames)
            marks.append(nn.functional.pad(mark, (0, longest - len(mark)), value=-1))
        return sequences(name, found, longest=longest, exit=torch.stack(marks))

    return Environments(load, names, ["validation"], ["test"])


def model(config: ToyConfig) -> nn.Module:
    """One hidden layer."""
    pixels = config.side**2
    return nn.Sequential(nn.Flatten(), MLP(pixels, pixels, 128, 1), nn.Unflatten(1, (1, config.side, config.side)))


def measured(skips: SkipConfig, exits: Tensor, network: nn.Module, environment: Environment) -> dict[str, float]:
    """The fraction of predictions that skip to the next exit, and of correct ones in rollouts from each exit."""
    device = next(network.parameters()).device
    batch = {name: leaf.to(device) for name, leaf in environment.take(slice(None)).items()}
    times = unroll(network, batch["frames"], batch["length"], skips).times
    starts, ends = times[:, :-1], times[:, 1:]
    made = ends > 0
    marks = batch["exit"].cpu()
    right = (marks.gather(1, starts.clamp(min=0)) >= 0) & (marks.gather(1, ends.clamp(min=0)) >= 0) & made
    # An exit lies between the two of a skip if more of them are behind its end.
    passed = (marks >= 0).cumsum(1)
    right &= passed.gather(1, ends.clamp(min=0)) - passed.gather(1, starts.clamp(min=0)) == 1
    exits = exits.to(device)
    rolled = rollout(network, exits, len(exits))
    following = torch.stack([exits.roll(-depth, 0) for depth in range(1, len(exits) + 1)], 1)
    return {
        "right_skips": float(right.sum() / made.sum()),
        "right_rollout": float(((rolled > 0.5) == (as_float(following) > 0.5)).flatten(2).all(2).double().mean()),
        "mean_skip": float((ends - starts)[made].double().mean()),
        "predictions": float(made.sum(1).double().mean()),
    }


def evaluation(config: ToyConfig) -> EnvironmentEvaluation:
    """The skips and the rollouts of the model."""
    return EnvironmentEvaluation(partial(measured, config.skips.skips, ring(config)), MODES)


def objective(config: ToyConfig) -> Objective:
    """The mean over all predictions, or the environments' means for an aggregator."""
    return skip_objective(config.skips.risk(config.run.seed), config.aggregation.aggregator)


SKIPS = Comparison(
    {
        "adaptive": {},
        "adaptive, no exploration": {"exploration_steps": 0},
        "fixed, Δt = 6": {"skip": "fixed", "stride": 6},
    },
    seeds=8,
    first_seed=11,  # seeds 0 to 8 chose the settings
    columns={
        "right skips": "ood_right_skips",
        "right rollouts": "ood_right_rollout",
        "mean skip": "ood_mean_skip",
        "model evaluations": "model_evaluations",
    },
    title="fraction of right skips and rollouts on other sequences, after training on 128",
)
settings = {"batch_size": 16, "held_out": 0.0, "epochs": 100, "evaluations": 10, "lr": 1e-2, "vectorize": "one-by-one"}
job = Job(
    environments=environments,
    model=model,
    objective=objective,
    evaluation=evaluation,
    config=ToyConfig().with_options(horizon=12, exploration_steps=300, sampling_steps=300, **settings),
    criterion="validation_right_skips",
    reproduces="Adaptive skip intervals (chapter 2 of the thesis): a toy of our own in which the right skips are known",
    figures=skip_figures,
    comparisons={"skips": SKIPS},
)
