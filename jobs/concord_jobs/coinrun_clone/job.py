"""Behavioural cloning on CoinRun (AND-mask paper, §3.3 and appendix B.6): learn from an expert on 64 levels.

A ResNet-18 learns an expert's distribution over actions, π*(a|s), from 1000 states of each of 64 levels, and is tested
on states of unseen levels. A feature that only one level has is a shortcut. Each batch comes from one level. The paper
masks over time: the temporal AND-mask moves a weight only while its gradients agree from batch to batch, and so from
level to level. The spatial mask compares the levels of one step, which the paper could not. As options::

    (none)                                                                              temporal AND-mask Adam
    --optimizer adam --lr 1e-3 --beta1 0.9                                              Adam
    --optimizer adam --lr 1e-3 --beta1 0.9 --environments-per-step 8 --batch-size 8 --aggregator and-mask
                                                                                        the spatial AND-mask

``concord data coinrun-clone`` makes the data with the included expert, ``concord train coinrun-clone`` trains one
clone, ``concord compare coinrun-clone`` compares the methods, ``concord tune coinrun-clone --method temporal-and-mask``
runs a study, and ``concord report coinrun-clone`` draws the comparison and the studies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from concord.analysis.figures import new_figure
from concord.environments import Environments
from concord.environments.collection import generator_for
from concord.extras import require_extra
from concord.models import ChannelsFirst, ResNet18
from concord.options import group
from concord.reinforcement.cloned_levels import ClonedLevels
from concord.reinforcement.cloning_data import CloningData, CloningOptions, make_cloning_data
from concord.reinforcement.games import ACTIONS
from concord.space import Choice, Entry, LogUniform, Space, Uniform
from concord.training import Data, Job, Measure, Run, Study, TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class CloneConfig(TrainConfig):
    """One clone of the expert; every training level is an environment (AND-mask paper, §3.3 and B.6)."""

    cloned: ClonedLevels = group(ClonedLevels)


def data_of(config: CloneConfig) -> CloningData:
    """The data of this configuration."""
    return config.cloned.read(config.data.data, config.run.output)


def environments(config: CloneConfig) -> Environments:
    """An environment for each training level, one for validation and one for the test."""
    if config.cloned.play_episodes:  # the last step of a run; a run without it needs no Procgen
        require_extra("coinrun", f"--play-episodes {config.cloned.play_episodes}")
    data, states = data_of(config), config.cloned.states
    levels = {f"level-{level}": level for level in data.levels[: config.cloned.levels or None]}

    def load(name: str) -> tuple[Tensor, Tensor]:
        if name not in levels:
            return data.split("test" if name == "test" else "validation")
        frames, policy = data.level(levels[name])
        if not states:
            return frames, policy
        # The states of a level are in the order of play, so the first would be those of the beginning.
        some = torch.randperm(len(frames), generator=generator_for(levels[name], "states"))[:states]
        return frames[some], policy[some]

    validation = ["validation"] if data.groups("validation") else []
    version = f"{data.version}-{states}" if states else data.version
    return Environments(load, levels, validation, ["test"], version=version)


def model(config: CloneConfig) -> nn.Module:
    """A ResNet-18 on the game's frames."""
    return nn.Sequential(ChannelsFirst(), ResNet18(classes=ACTIONS))


def divergence(outputs: Tensor, targets: Tensor) -> Tensor:
    """KL(π*‖π), the mean over states, in nats; outputs are π's logits, targets π*."""
    return nn.functional.kl_div(outputs.log_softmax(1), targets, reduction="batchmean")


def agreement(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the most probable actions of clone and expert are equal, ``(states,)``."""
    return (outputs.argmax(1) == targets.argmax(1)).float()


def unseen_return(config: CloneConfig, clone: nn.Module) -> Mapping[str, float]:
    """The clone's return on unseen levels."""
    if config.cloned.play_episodes == 0:
        return {}
    played = config.cloned.played(data_of(config), clone)
    return {"ood_return": played.mean, "ood_return_error": played.standard_error}


def levels_figure(frames: Mapping[str, Tensor]) -> "Figure":
    """A frame ``(64, 64, 3)`` of each level (Fig. 17), three in a row."""
    rows = -(-len(frames) // 3)
    figure = new_figure(6, 2.2 * rows)
    panels = figure.subplots(rows, 3, squeeze=False).flatten()
    for axes in panels:
        axes.set_axis_off()
    for axes, (name, frame) in zip(panels, frames.items(), strict=False):
        axes.imshow(frame)
        axes.set_title(name, fontsize=9)
    return figure


def figures(job: Job[Any], config: CloneConfig, outcome: Run, clone: nn.Module) -> "Mapping[str, Figure]":
    """A state of each of the first six training levels, from the middle: they begin alike."""
    levels = environments(config)
    states = {name: levels[name].inputs for name in levels.train[:6]}
    return {"levels": levels_figure({name: each[len(each) // 2] for name, each in states.items()})}


# The searched options; the paper names them, not their ranges.
SEARCHED: dict[str, Entry] = {
    "aggregator": "mean",
    "environments_per_step": 1,
    "play_episodes": 0,
    "lr": LogUniform(1e-4, 1e-1),
    "beta1": Uniform(0.0, 0.99),
    "l2": LogUniform(1e-5, 1.0),
    "regularization": Choice("decoupled", "coupled"),
}
MASKED: dict[str, Entry] = {"beta3": Uniform(0.0, 0.99), "temporal_threshold": Uniform(0.0, 1.0)}
STUDIES = {
    name: Study(Space({**SEARCHED, "optimizer": name, **own}))
    for name, own in {"temporal-and-mask": MASKED, "adam": {}}.items()
}


job = Job(
    environments=environments,
    model=model,
    loss=divergence,
    # A step has one level's states. The optimizer has the best settings of the paper's Table 3.
    config=CloneConfig().with_options(
        precision="bfloat16",
        environments_per_step=1,
        aggregator="mean",
        threshold=0.5,
        optimizer="temporal-and-mask",
        beta1=0.21,
        beta3=0.79,
        temporal_threshold=0.36,
        lr=0.0078,
        l2=0.057,
        batch_size=64,
        epochs=20,
        held_out=0.0,
        data=None,
    ),
    measures={"agreement": Measure(agreement, mode="max")},
    reproduces="AND-mask paper §3.3 (cloning a CoinRun expert, panel of the best runs): Fig. 18; Table 3",
    comparisons="tables.py",
    figures=figures,
    final_measures=unseen_return,
    data=Data(CloningOptions, make_cloning_data),
    studies=STUDIES,
)
