"""A job with a loop of its own: gradient descent on the square of a number, from a start that the seed draws."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.space import LogUniform, Space
from concord.training import Data, Evaluation, Job, Loop, RunConfig, Study
from concord.training.context import RunContext


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Descent."""

    lr: float = 0.01
    """Learning rate."""
    epochs: int = 4
    """Of five steps each."""


def evaluations(config: Config, context: RunContext) -> Iterator[Evaluation]:
    if config.lr > 2:
        raise InputError(f"--lr {config.lr:g}: goes to infinity")
    place = 1 + random.Random(config.run.seed).random()
    for epoch in range(1, config.epochs + 1):
        for _ in range(5):
            place -= config.lr * 2 * place
        yield Evaluation(epoch, 5 * epoch, {"distance": abs(place), "steps": 5.0 * epoch})


@dataclass(frozen=True, kw_only=True)
class Starts:
    """The starts of the descents."""

    output: Path = Path("starts.txt")
    """File for them."""


def make(options: Starts, info: Callable[[str], None]) -> dict[str, Any]:
    options.output.write_text("\n".join(str(1 + random.Random(seed).random()) for seed in range(3)))
    return {"starts": 3}


job = Job(
    config=Config(),
    data=Data(Starts, make),
    loop=Loop(evaluations, lambda config: config.epochs, {"distance": "min", "steps": None}),
    studies={"rates": Study(Space({"lr": LogUniform(1e-3, 0.3)}))},
)
