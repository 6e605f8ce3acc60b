"""Figures of an agent: its return by environment steps, and an episode as an animation."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from concord.analysis.figures import BLUE, ORANGE, finish, one_panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS = 256
_LONGEST_SECONDS = 20


def return_curve(training: Sequence[tuple[int, float]], unseen: Sequence[tuple[int, float, float]]) -> "Figure":
    """Mean return of late training episodes ``(steps, mean)``, and on unseen levels ``(steps, mean, error)``."""
    figure, axes = one_panel(5, 3.2, layout=None)
    if training:
        axes.plot(*zip(*training, strict=True), color=BLUE, linewidth=1, label="training, last 200 episodes")
    if unseen:
        steps, means, errors = zip(*unseen, strict=True)
        intervals = [1.96 * error for error in errors]
        axes.errorbar(
            steps, means, intervals, color=ORANGE, marker=".", capsize=2, label="unseen levels, 95 % interval"
        )
    axes.set(xlabel="environment steps", ylabel="mean return of an episode")
    finish(axes, loc="lower right")
    return figure


def write_video(policy: Callable[[Tensor], Tensor], environment: Any, path: Path) -> None:
    """Play one episode in a vector environment with one rendered copy, and write a GIF of at most 20 seconds."""
    rate = int(environment.metadata["render_fps"])
    generator = torch.Generator().manual_seed(0)
    frames, _ = environment.reset()
    pictures: list[Image.Image] = []
    ended = False
    with torch.no_grad():
        while not ended and len(pictures) < _LONGEST_SECONDS * rate:
            pictures.append(Image.fromarray(environment.render()[0]).resize((_PIXELS, _PIXELS)))
            logits = policy(torch.from_numpy(frames)).float().cpu()
            action = torch.multinomial(logits.softmax(1), 1, generator=generator)
            frames, _, ends, _, _ = environment.step(action[:, 0].numpy().astype(np.int64))
            ended = bool(ends[0])
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=1000 // rate, loop=0)
