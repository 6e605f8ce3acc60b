"""Behavioural cloning on CoinRun (AND-mask paper, §3.3 and appendix B.6): learn from an expert on 64 levels.

A ResNet-18 learns an expert's distribution over actions, π*(a|s), from 1000 states of each of 64 levels, each batch
from one level, and is tested on states of levels it never saw. What only one level shows is a shortcut. The paper masks
over time: the temporal AND-mask moves a weight only while its gradients agree from batch to batch, and so from level to
level. Here the levels of one step can be compared too, which the paper could not: the spatial mask. As options::

    (none)                                                                              temporal AND-mask Adam
    --optimizer adam --lr 1e-3 --beta1 0.9                                              Adam
    --optimizer adam --lr 1e-3 --beta1 0.9 --environments-per-step 8 --batch-size 8 --aggregator and-mask
                                                                                        the spatial AND-mask

``concord data coinrun-clone`` makes the data with the expert that comes with Concord, ``concord train coinrun-clone``
trains one clone, ``concord tune coinrun-clone --method temporal-and-mask`` is a study, and ``concord report
coinrun-clone`` does what is missing of a comparison of the methods, and draws it and the studies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concord.analysis.cloning_figures import best_runs_figure, mean_curves_figure
from concord.analysis.figures import save
from concord.defaults import DEFAULT_OUTPUT
from concord.environments import Environments
from concord.errors import InputError
from concord.models import ChannelsFirst, ResNet18
from concord.options import option_values
from concord.reinforcement.cloning_data import CloningData, CloningOptions, cloning_folder, make_cloning_data
from concord.reinforcement.episodes import play
from concord.reinforcement.extra import require_coinrun
from concord.reinforcement.procgen_environment import ACTIONS, Difficulty, ProcgenVectorEnv
from concord.space import Choice, Entry, LogUniform, Space, Uniform
from concord.studies.report import comparable_trials, load_trials
from concord.training import Data, Job, Measure, ProcessContext, Report, Study, TrainConfig
from concord.training.sweep import sweep


@dataclass(frozen=True, kw_only=True)
class CloneConfig(TrainConfig):
    """One clone of the expert; every training level is an environment (AND-mask paper, §3.3 and B.6)."""

    # fmt: off
    game: str = "coinrun"
    """Which of Procgen's 16 games."""
    difficulty: Difficulty = "easy"
    """Distribution of levels: easy or hard."""
    levels: int = 0
    """Train on the first so many levels; 0 takes all there are."""
    states: int = 0
    """Train on the first so many states of each level; 0 takes all there are."""
    play_episodes: int = 100
    """Episodes that the trained clone plays on unseen levels; 0 plays none."""
    # fmt: on

    def check(self) -> None:
        """Also refuse what makes no data."""
        super().check()
        for option in ("levels", "states", "play_episodes"):
            self.require(option, option_values(self)[option] >= 0, "must not be negative")


def data_of(config: CloneConfig) -> CloningData:
    """The data of this configuration.

    Raises:
        InputError: there are none, or they are of something else.
    """
    data = CloningData(cloning_folder(config.data.data_dir, config.run.output, config.game, config.difficulty))
    for option in ("game", "difficulty"):
        found = data.manifest.get(option)
        config.require(option, found == option_values(config)[option], f"the data in {data.folder} are of {found}")
    config.require("levels", config.levels <= len(data.levels), f"the data have {len(data.levels)} training levels")
    there = data.manifest["states"]
    config.require("states", config.states <= there, f"the data have {there} states of each level")
    return data


def environments(config: CloneConfig) -> Environments:
    """An environment for each training level, one for validation and one for the test."""
    if config.play_episodes:  # which is what comes last; a run without it needs no Procgen
        require_coinrun(f"--play-episodes {config.play_episodes}")
    data = data_of(config)
    levels = {f"level-{level}": level for level in data.levels[: config.levels or None]}

    def load(name: str) -> tuple[Tensor, Tensor]:
        if name not in levels:
            return data.split("test" if name == "test" else "validation")
        frames, policy = data.level(levels[name])
        return frames[: config.states or None], policy[: config.states or None]

    validation = ["validation"] if data.has("validation") else []
    return Environments(load, levels, validation, ["test"], version=data.version)


def model(config: CloneConfig) -> nn.Module:  # noqa: ARG001
    """A ResNet-18 on frames as the game gives them."""
    return nn.Sequential(ChannelsFirst(), ResNet18(classes=ACTIONS))


def divergence(outputs: Tensor, targets: Tensor) -> Tensor:
    """KL(π*‖π), the mean over states, in nats; outputs are π's logits, targets π*."""
    return nn.functional.kl_div(outputs.log_softmax(1), targets, reduction="batchmean")


def agreement(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the likeliest action of the clone is the expert's, ``(states,)``."""
    return (outputs.argmax(1) == targets.argmax(1)).float()


def unseen_return(config: CloneConfig, clone: nn.Module) -> Mapping[str, float]:
    """What the clone earns when it plays levels that it never saw."""
    if config.play_episodes == 0:
        return {}
    device = next(clone.parameters()).device
    first, levels = data_of(config).manifest["unseen_levels"]
    environment = ProcgenVectorEnv(
        min(config.play_episodes, 64),
        config.game,
        levels=levels,
        first_level=first,
        difficulty=config.difficulty,
        seed=1,
    )
    try:
        played = play(lambda frames: clone(frames.to(device)), environment, config.play_episodes)
    finally:
        environment.close()
    return {"ood_return": played.mean, "ood_return_error": played.standard_error}


# What the searches vary; the paper names the options, not their ranges.
SEARCHED: dict[str, Entry] = {
    "aggregator": "mean",
    "environments_per_step": 1,
    "play_episodes": 0,
    "lr": LogUniform(1e-4, 1e-1),
    "beta1": Uniform(0.0, 0.99),
    "l2": LogUniform(1e-5, 1.0),
    "regularization": Choice("decoupled", "coupled"),
}
# Table 3, as the paper orders its columns: lr, β₁, β₃, τ, weight decay.
TABLE_3 = (
    (0.0078, 0.21, 0.79, 0.36, 0.057),
    (0.0072, 0.26, 0.86, 0.40, 0.041),
    (0.0080, 0.23, 0.84, 0.41, 0.045),
    (0.0068, 0.33, 0.72, 0.47, 0.077),
    (0.0063, 0.67, 0.65, 0.47, 0.080),
)
STUDIES = {
    "temporal-and-mask": Study(
        Space(
            SEARCHED
            | {
                "optimizer": "temporal-and-mask",
                "beta3": Uniform(0.0, 0.99),
                "temporal_threshold": Uniform(0.0, 1.0),
            }
        ),
        selection="validation",
    ),
    "adam": Study(Space(SEARCHED | {"optimizer": "adam"}), selection="validation"),
}

LEVELS_TOGETHER = 8  # in a step of the spatial mask


def methods(levels: int) -> dict[str, dict[str, Any]]:
    """The ways to learn from so many levels, steps holding as equally many states as can be.

    Temporal AND-mask Adam has the best settings of the paper's own search, the others PyTorch's: nothing is tuned here.
    """
    together = max(count for count in range(1, LEVELS_TOGETHER + 1) if levels % count == 0)
    plain = {"beta1": 0.9, "lr": 1e-3, "l2": 0.057, "optimizer": "adam"}
    size = max(1, job.config.data.batch_size // together)
    mixed = {**plain, "environments_per_step": together, "batch_size": size}
    spatial = {"adam, levels together": mixed, "spatial-and-mask": {**mixed, "aggregator": "and-mask"}}
    return {"adam": plain, "temporal-and-mask": {}, **(spatial if together > 1 else {})}


@dataclass(frozen=True, kw_only=True)
class CloneReport:
    """Compare the methods on the same data, doing what is missing; and the studies, if there are some."""

    # fmt: off
    seeds: int = 3
    """Clones of each method; 0 leaves the comparison out."""
    epochs: int = 20
    """Passes over the training data."""
    levels: int = 0
    """Train on the first so many levels; 0 takes all there are."""
    states: int = 0
    """Train on the first so many states of each level; 0 takes all there are."""
    play_episodes: int = 100
    """Episodes that each clone plays on unseen levels; 0 plays none."""
    best: int = 10
    """How many of the best trials of each study's method are shown."""
    use_gpu: bool = False
    """Train the clones on this machine's GPU."""
    data_dir: Path | None = None
    """Folder with the data; made with the expert that comes with Concord if there are none."""
    output: Path = DEFAULT_OUTPUT
    """Folder of data, studies and figures."""
    # fmt: on


def report(options: CloneReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """The methods over seeds, then the panel of best runs (§3.3), Fig. 18 and Table 3 from the studies."""
    for option in ("seeds", "levels", "states", "play_episodes"):
        if getattr(options, option) < 0:
            raise InputError(f"--{option.replace('_', '-')} {getattr(options, option)}: must not be negative")
    for option in ("epochs", "best"):
        if getattr(options, option) < 1:
            raise InputError(f"--{option} {getattr(options, option)}: must be at least 1")
    if options.use_gpu and not torch.cuda.is_available():
        raise InputError("--use-gpu: there is no GPU here")
    result: dict[str, Any] = {"job": "coinrun-clone", "figures": {}}
    if options.seeds:
        result["clones"] = _compared(options, info)
    result |= _studied(options, result["figures"])
    return result


def _compared(options: CloneReport, info: Callable[[str], None]) -> dict[str, Any]:
    """Metrics of every method's clones: mean, least and largest over seeds."""
    wanted = CloningOptions(data_dir=options.data_dir, output=options.output)
    if not (wanted.folder / "manifest.json").exists():
        make_cloning_data(wanted, info)
    base = job.config.with_options(
        epochs=options.epochs,
        levels=options.levels,
        states=options.states,
        play_episodes=options.play_episodes,
        data_dir=options.data_dir,
        output=options.output,
        evaluations=1,
    )
    configurations = {
        method: [base.with_options(seed=seed, **changed) for seed in range(options.seeds)]
        for method, changed in methods(len(environments(base).train)).items()
    }
    record = options.output / "reports" / "coinrun-clone" / "clones.jsonl"
    place = ProcessContext(device=torch.device("cuda" if options.use_gpu else "cpu"))
    table: dict[str, Any] = {}
    for metric in ("train_loss", "ood_loss", "ood_agreement", *(["ood_return"] if options.play_episodes else [])):
        for method, values in sweep(job, configurations, metric, record, info, place).items():
            numbers = torch.tensor(values)
            shown = {"mean": float(numbers.mean()), "least": min(values), "largest": max(values)}
            table.setdefault(method, {})[metric] = {name: round(value, 5) for name, value in shown.items()}
    return table


def _studied(options: CloneReport, figures: dict[str, str]) -> dict[str, Any]:
    """The best trials of each method's studies: minimum test KL, curves, and their options."""
    trials = load_trials("coinrun-clone", job.config, options.output)
    varied = ("lr", "beta1", "beta3", "temporal_threshold", "l2", "regularization", "optimizer")
    trials = comparable_trials(trials, varied) if trials else []
    if not trials:
        return {}
    best: dict[str, list[Any]] = {}
    for method in STUDIES:
        of_method = [trial for trial in trials if trial.config.optimizer.optimizer == method]
        smallest = sorted(of_method, key=lambda trial: min(at.metrics["ood_loss"] for at in trial.history))
        if smallest:
            best[method] = smallest[: options.best]
    folder = options.output / "reports" / "coinrun-clone"
    minima = {method: [min(at.metrics["ood_loss"] for at in t.history) for t in each] for method, each in best.items()}
    curves = {
        title: {
            method: [[(at.epoch / t.config.schedule.epochs, at.metrics[metric]) for at in t.history] for t in each]
            for method, each in best.items()
        }
        for title, metric in (("training levels", "train_loss"), ("unseen levels", "ood_loss"))
    }
    drawn = best_runs_figure(minima, "minimum test KL")
    figures["best-runs"] = str(save(drawn, folder / "best-runs.png"))
    figures["curves"] = str(save(mean_curves_figure(curves, "KL"), folder / "curves.png"))
    rows = {
        f"{method} {rank}": {
            "test KL": round(minimum, 5),
            **{option: option_values(trial.config)[option] for option in varied[:-1]},
        }
        for method, each in best.items()
        for rank, (trial, minimum) in enumerate(zip(each[:5], minima[method], strict=False), 1)
    }
    return {
        "table_3": rows,
        "trials": {method: sum(t.config.optimizer.optimizer == method for t in trials) for method in best},
    }


job = Job(
    environments=environments,
    model=model,
    loss=divergence,
    # A step has one level's states. Of the optimizer, the best settings of the paper's Table 3.
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
        data_dir=None,
    ),
    measures={"agreement": Measure(agreement, mode="max")},
    reproduces="AND-mask paper §3.3 (cloning a CoinRun expert, algorithm 1): its panel of best runs, Fig. 18 and "
    "Table 3 by smaller searches on fewer states, where Adam is ahead",
    report=Report(CloneReport, report),
    final_measures=unseen_return,
    data=Data(CloningOptions, make_cloning_data),
    studies=STUDIES,
)
