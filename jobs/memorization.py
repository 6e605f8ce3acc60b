"""Memorization of random labels (AND-mask paper, §3.2): every example is an environment of its own.

A network that averages gradients memorizes labels that were drawn at random. Where the gradients of a batch's examples
have to agree in sign, it cannot; with the true labels it learns nearly as well. ``concord train memorization`` is one
run, ``concord tune memorization --search grid`` one seed of Fig. 8 and 16, ``concord report memorization`` draws them.
With ``--data mnist --model mlp`` the experiment fits a laptop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from concord.analysis.figures import save
from concord.analysis.memorization_figures import memorization_figure, thresholds_figure
from concord.environments import Environments, shuffle_labels
from concord.environments.image_options import ImageOptions, source
from concord.errors import InputError
from concord.models.image_options import ImageNetworkOptions
from concord.space import Choice, Space
from concord.studies.report import comparable_trials, load_trials
from concord.training import Job, Report, Study, TrainConfig
from concord.training.options import DEFAULT_OUTPUT


@dataclass(frozen=True, kw_only=True)
class MemorizationConfig(TrainConfig):
    """Memorization of random labels, every example being an environment (AND-mask paper, §3.2, Fig. 8 and 16)."""

    # fmt: off
    labels: Literal["random", "true"] = "random"
    """Train on shuffled labels, or on the true ones."""
    images: ImageOptions = field(default_factory=ImageOptions)
    network: ImageNetworkOptions = field(default_factory=ImageNetworkOptions)
    # fmt: on


def model(config: MemorizationConfig) -> nn.Module:
    """The network for these images."""
    data = config.images.images(config.data.data_dir)
    channels, height, width = data.train.images.shape[1:]
    return config.network.network(channels, height, width, data.classes)


def environments(config: MemorizationConfig) -> Environments:
    """The training images with shuffled labels or their own, and the test images with their own."""
    data = config.images.images(config.data.data_dir)
    labels, _ = shuffle_labels(data.train.labels, 1.0 if config.labels == "random" else 0.0, config.run.seed)
    return Environments.from_arrays(
        {"train": (data.train.images, labels), "test": (data.test.images, data.test.labels)}, test=["test"]
    )


@dataclass(frozen=True, kw_only=True)
class MemorizationReport:
    """Figures of memorization: curves for each threshold (Fig. 8), and accuracy by threshold (Fig. 16)."""

    # fmt: off
    data: str | None = None
    """cifar10, mnist, or the folder; that of the newest study if not given."""
    output: Path = DEFAULT_OUTPUT
    """Folder with the studies."""
    # fmt: on


def report(options: MemorizationReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Fig. 8 and 16 from the trials of this job's studies, over all their seeds."""
    trials = load_trials("memorization", job.config, options.output)
    if not trials:
        info("memorization: no study yet; concord tune memorization --search grid makes one")
        return {"job": "memorization", "figures": {}}
    data = None if options.data is None else source(options.data)
    trials = comparable_trials(trials, ("labels", "threshold", "example_gradient"), data=data)
    if not trials:
        raise InputError(f"--data {options.data}: no study of memorization with these images in {options.output}")
    # Panels of the figures: one for each kind of labels, and for each definition of an example's gradient in use.
    several = len({trial.config.aggregation.example_gradient for trial in trials}) > 1
    curves: dict[str, dict[float, list[Any]]] = {}
    for trial in trials:
        config = trial.config
        panel = f"{config.labels} labels" + (f", by {config.aggregation.example_gradient}" if several else "")
        curves.setdefault(panel, {}).setdefault(config.aggregation.threshold, []).append(trial.history)
    folder = options.output / "reports" / "memorization"
    name = Path(trials[-1].config.images.data).name
    accuracy = {
        f"{panel}, τ={threshold}": {
            split: [round(history[-1].metrics[f"{split}_accuracy"], 4) for history in histories]
            for split in ("train", "ood")
        }
        for panel, by_threshold in sorted(curves.items())
        for threshold, histories in sorted(by_threshold.items())
    }
    return {
        "job": "memorization",
        "data": trials[-1].config.images.data,
        "figures": {
            "curves": str(save(memorization_figure(curves), folder / f"curves-{name}.png")),
            "thresholds": str(save(thresholds_figure(curves), folder / f"thresholds-{name}.png")),
        },
        "accuracy": accuracy,
    }


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    # The settings of §3.2 and B.5.
    config=MemorizationConfig().with_options(
        per_example=True, threshold=0.2, rescale=False, batch_size=80, epochs=80, lr=5e-4, held_out=0.0
    ),
    reproduces="AND-mask paper §3.2 (memorization of random labels): Fig. 8, 16 on MNIST; on CIFAR-10 only "
    "1,000 images",
    report=Report(MemorizationReport, report),
    # The thresholds of Fig. 8, of which 0 averages; one seed of the experiment with --search grid.
    studies={
        "thresholds": Study(
            Space({"labels": Choice("random", "true"), "threshold": Choice(0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)})
        )
    },
)
