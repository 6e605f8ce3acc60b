"""A job with its own loop: gradient descent on the square of a number, from a start drawn by the seed."""

import functools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.space import LogUniform, Space
from concord.training import Data, Evaluation, Job, Loop, RunConfig, RunContext, Study


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Descent."""

    lr: float = 0.01
    """Learning rate."""
    epochs: int = 4
    """Of five steps each."""
    pause: float = 0.0
    """Seconds after each epoch."""


def descend(config: Config, context: RunContext) -> Iterator[Evaluation]:
    if config.lr > 2:
        raise InputError(f"--lr {config.lr:g}: goes to infinity")
    done, place = 0, 1 + random.Random(config.run.seed).random()
    if context.start is not None:
        done, place = json.loads((context.start / "place.json").read_text())
    epochs = range(1, config.epochs + 1)
    for epoch in epochs[done:]:
        for step in range(5 * epoch - 4, 5 * epoch + 1):
            place -= config.lr * 2 * place
            context.log({"slope": 2 * place}, step)
        yield Evaluation(epoch, 5 * epoch, {"distance": abs(place), "steps": 5.0 * epoch})
        context.checkpoint(functools.partial(write, "place.json", (epoch, place)), 5 * epoch)
        time.sleep(config.pause)
    context.keep("end.json", lambda path: write(path.name, place, path.parent))


def write(name: str, value: Any, folder: Path) -> None:
    (folder / name).write_text(json.dumps(value))


@dataclass(frozen=True, kw_only=True)
class Starts:
    """The starts of the descents."""

    output: Path = Path("starts.txt")
    """File for them."""


def make(options: Starts, info: Callable[[str], None]) -> dict[str, Any]:
    options.output.write_text("\n".join(str(1 + random.Random(seed).random()) for seed in range(3)))
    return {"starts": 3}


job = Job(
    loop=Loop(descend, epochs=lambda config: config.epochs, metrics={"distance": "min", "steps": None}),
    config=Config(),
    data=Data(Starts, make),
    studies={"rates": Study(Space({"lr": LogUniform(1e-3, 0.3)}))},
)
