"""Colored MNIST: a colour that misleads in the test (Bae et al., Meta-Learned Invariant Risk Minimization, section 4).

``concord train colored-mnist --objective irm`` trains one model; ``concord report colored-mnist`` makes the paper's
tables and figures over seeds, with the settings of ``METHODS``.

The champion is the version with the least spread of held-out losses between the training environments, the paper's
criterion (its section 3.3): a low loss does not tell a model of the shapes from one of the colours, since colours lower
it too. But a network that has learned nothing has no spread at all, so a champion also has to classify: in the worst
environment at least half as much better than chance as the label noise lets anyone be who ignores the colours.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from concord.analysis.colored_mnist_figures import band_figure, flips_figure, layers_figure, penalty_figure
from concord.analysis.figures import save
from concord.analysis.similarity import layer_outputs, pwcca
from concord.analysis.spread import with_spread
from concord.environments import ColoredMNIST, Environments, image_dataset
from concord.environments.images import ImageDataset
from concord.errors import InputError
from concord.models import MLP, Pixels
from concord.objectives import MetaIRM
from concord.options import option_values
from concord.training import Job, Report, TrainConfig
from concord.training.evaluation import correct
from concord.training.options import DEFAULT_OUTPUT
from concord.training.sweep import histories


@dataclass(frozen=True, kw_only=True)
class ColoredMNISTConfig(TrainConfig):
    """Colored MNIST: two training environments whose colours mislead seldom, tests whose colours mislead more."""

    # fmt: off
    classes: int = 2
    """Classes, and colours: 2, 5 or 10."""
    flips: tuple[float, ...] = (0.1, 0.2)
    """How often the colour misleads in each training environment, p_e."""
    test_flip: float = 0.9
    """How often it misleads in the test."""
    observed_flips: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    """More tests, which are only reported on."""
    noise: float = 0.25
    """How often the label is wrong, η."""
    noise_gap: float = 0.0
    """How much more often in the first training environment than in the last; the mean stays."""
    examples: int = 25_000
    """Examples to train on in each environment; its held-out part comes on top."""
    patch_flips: tuple[float, ...] = ()
    """How often a second shortcut, a patch in a corner, misleads in each training environment; none has no patch."""
    grey: bool = False
    """Images without colour."""
    similarity: bool = False
    """Measure at the end how alike representations are (PWCCA): under other colours, and with meta-irm before and after
    the inner steps."""
    side: int = 14
    """Pixels of a side: 14, or 28."""

    hidden_units: int = 256
    """Width of the hidden layers."""
    hidden_layers: int = 1
    """Number of hidden layers."""
    # fmt: on

    def check(self) -> None:
        """Also refuse what makes no data and no network."""
        super().check()
        for option in ("examples", "hidden_units", "hidden_layers"):
            self.require(option, option_values(self)[option] >= 1, "must be at least 1")


@functools.lru_cache(maxsize=1)
def digits(data_dir: Path | None) -> ImageDataset:
    """MNIST, read once a process."""
    return image_dataset("mnist", data_dir)


def environments(config: ColoredMNISTConfig) -> Environments:
    """The coloured digits."""
    data = digits(config.data.data_dir)
    examples, most = round(config.examples / (1 - config.data.held_out)), len(data.train) // max(len(config.flips), 1)
    expected = (
        f"with --held-out {config.data.held_out:g} that is {examples} for each training environment; there are {most}"
    )
    config.require("examples", examples <= most, expected)
    return ColoredMNIST(
        data.train,
        data.test,
        flips=config.flips,
        test_flip=config.test_flip,
        observed_flips=config.observed_flips,
        examples=examples,
        classes=config.classes,
        noise=config.noise,
        noise_gap=config.noise_gap,
        patch_flips=config.patch_flips,
        grey=config.grey,
        side=config.side,
        seed=config.run.seed,
    ).as_environments()


def model(config: ColoredMNISTConfig) -> nn.Module:
    """An MLP with ReLU, on pixels of 0 to 1."""
    channels = 1 if config.grey else config.classes
    width = channels * config.side**2
    return nn.Sequential(
        Pixels(), MLP(width, config.classes, config.hidden_units, config.hidden_layers, activation="relu")
    )


def required(config: ColoredMNISTConfig) -> Mapping[str, float]:
    """What a network that ignores the colours can reach, and chance: the middle of the two (62.5 % of two classes)."""
    return {"worst_held_out_accuracy": (1 - config.noise + 1 / config.classes) / 2}


def scale_slope(outputs: Tensor, targets: Tensor) -> Tensor:
    """The derivative of each example's cross-entropy by a factor on its outputs; an environment's mean is what IRMv1
    squares."""
    probabilities = outputs.softmax(1)
    return (probabilities * outputs).sum(1) - outputs.gather(1, targets[:, None])[:, 0]


def similarities(config: ColoredMNISTConfig, trained: nn.Module) -> Mapping[str, float]:
    """PWCCA of representations of the test digits under other colours with those at the first observed p_e (A.2), and
    with meta-IRM of each layer before and after the inner steps (A.1).

    The representation is what the last layer gets; with irm, whose fixed classifier comes last, what it gives.
    """
    if not config.similarity:
        return {}
    data = environments(config)
    tests = {flip: f"flip-{flip:g}" for flip in config.observed_flips} | {config.test_flip: data.test[0]}
    representations = {}
    for flip, name in tests.items():
        *_, hidden, outputs = layer_outputs(trained, data[name].inputs).values()
        representations[flip] = outputs if config.objective.objective == "irm" else hidden.relu()
    first = representations[config.observed_flips[0]]
    measured = {f"pwcca_{flip:g}": pwcca(first, each) for flip, each in representations.items()}
    objective = config.objective_of(nn.functional.cross_entropy, 1)
    if isinstance(objective, MetaIRM):
        objective.drop_grad = 0.0
        for name in data.train:
            with torch.enable_grad():
                adapted = objective.adapted(trained, (data[name].inputs, data[name].targets))
            after = layer_outputs(trained, data[name].inputs, adapted)
            before = layer_outputs(trained, data[name].inputs)
            for layer, (one, other) in enumerate(zip(before.values(), after.values(), strict=True)):
                measured[f"pwcca_adapted_{layer}_{name}"] = pwcca(one, other)
    return measured


# What each method is trained with by the report; docs/objectives.md says what chose it.
_SHARED: dict[str, Any] = {"epochs": 80, "batch_size": 5000, "lr": 2e-3, "milestones": (0.6, 0.8), "evaluations": 12}
_PENALIZED = {**_SHARED, "penalty_warmup": 0.4}
_ERM = {**_SHARED, "objective": "erm", "aggregator": "mean", "epochs": 60}
METHODS: dict[str, dict[str, Any]] = {
    "erm": _ERM,
    "irm": {**_PENALIZED, "objective": "irm", "penalty_weight": 1e5, "milestones": ()},
    "mm-rex": {**_PENALIZED, "objective": "mm-rex", "penalty_weight": 100.0},
    "vrex": {**_PENALIZED, "objective": "vrex", "penalty_weight": 1e4},
    "meta-irm": {
        **_SHARED,
        "objective": "meta-irm",
        "inner_lr": 0.55,
        "penalty_weight": 0.1,
        "penalty_warmup": 0.0,
        "lr": 1e-3,
        "decay": 0.4,
        "milestones": (0.7, 0.85),
        "evaluations": 40,
        "stop_spread": 0.001,
        "stop_from": 0.5,
    },
    "erm, grey": {**_ERM, "grey": True},
}
# The inner step that leaves colours alone is larger with more classes, and smaller with a second shortcut.
META_IRM_CLASSES: dict[int, dict[str, Any]] = {
    5: {"inner_lr": 0.9, "epochs": 60, "evaluations": 12},
    10: {"inner_lr": 1.3, "epochs": 60, "evaluations": 12},
}
META_IRM_PATCHES: dict[str, Any] = {
    "inner_lr": 0.22,
    "drop_grad": 0.2,
    "lr": 1e-3,
    "milestones": (0.3, 0.5, 0.7),
    "epochs": 60,
    "evaluations": 30,
}
# The paper's numbers in per cent: at p_e = .1, .2, .9, or in training and at .9.
PAPER_1 = {
    "erm": ("88.6 ± 0.3", "79.7 ± 0.6", "16.4 ± 0.8"),
    "irm": ("71.4 ± 0.9", "70.8 ± 1.0", "66.9 ± 2.5"),
    "mm-rex": ("70.8 ± 1.5", "70.4 ± 2.0", "66.1 ± 4.9"),
    "vrex": ("71.5 ± 0.8", "71.1 ± 0.9", "68.6 ± 1.2"),
    "meta-irm": ("70.9 ± 0.9", "70.8 ± 1.0", "70.4 ± 0.9"),
    "erm, grey": ("72.6 ± 0.3", "72.7 ± 0.3", "73.0 ± 0.5"),
}
PAPER_2 = {
    ("erm", 5): ("95.2 ± 0.2", "41.0 ± 0.6"),
    ("irm", 5): ("82.2 ± 0.4", "62.0 ± 2.4"),
    ("meta-irm", 5): ("76.4 ± 1.4", "74.0 ± 3.6"),
    ("erm, grey", 5): ("73.2 ± 0.2", "71.7 ± 0.4"),
    ("erm", 10): ("92.6 ± 0.2", "39.2 ± 0.9"),
    ("irm", 10): ("83.4 ± 0.5", "58.6 ± 2.5"),
    ("meta-irm", 10): ("79.5 ± 0.6", "73.4 ± 3.2"),
    ("erm, grey", 10): ("73.2 ± 0.1", "71.9 ± 0.5"),
}
PAPER_3 = {
    "irm": ("73.2 ± 1.6", "71.7 ± 1.3", "58.5 ± 2.5"),
    "vrex": ("75.0 ± 0.8", "73.4 ± 0.6", "61.3 ± 1.4"),
    "meta-irm": ("70.6 ± 1.5", "70.5 ± 1.6", "68.3 ± 2.3"),
}
PAPER_4 = {
    "irm": ("93.5 ± 0.2", "86.4 ± 0.3", "13.4 ± 0.3"),
    "vrex": ("93.6 ± 0.4", "86.3 ± 0.3", "13.5 ± 0.3"),
    "meta-irm": ("58.1 ± 3.1", "56.8 ± 2.9", "54.5 ± 4.0"),
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "without spread": {"penalty_weight": 0.0},
    "first order": {"first_order": True},
    "same environment": {"same_environment": True},
    "whole": {},
}
PAPER_5 = {
    "without spread": ("73.0 ± 0.8", "", "64.2 ± 3.2"),
    "first order": ("62.6 ± 5.5", "", "59.1 ± 6.3"),
    "same environment": ("89.3 ± 1.6", "", "13.6 ± 6.6"),
    "whole": ("70.9 ± 0.9", "", "70.4 ± 0.9"),
}
GAPS = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)
PARTS_OF_EXAMPLES = (1, 2, 4)
PATCHES = (0.2, 0.1)

Part = Literal["table-1", "table-2", "table-3", "table-4", "table-5", "gap", "similarity"]


@dataclass(frozen=True, kw_only=True)
class ColoredMNISTReport:
    """Tables 1 to 5 and figures 3 to 6 and 8 to 10 of the meta-IRM paper, over seeds, beside the paper's numbers."""

    # fmt: off
    seeds: int = 10
    """How many seeds of the data and the first weights."""
    first_seed: int = 2
    """The first of them; the settings were chosen with seeds 0, 1 and 12 to 41, and after looks at 2 to 11."""
    parts: tuple[Part, ...] = ("table-1", "table-2", "table-3", "table-4", "table-5", "gap", "similarity")
    """What to make: tables with their figures (3 with table 1, 5 and 6 with table 3, 8 with table 4), the noise gap
    (figure 4), the similarity of representations (figures 9 and 10)."""
    examples: int = 25_000
    """Examples to train on in each environment; table 3 and its figures take half and a quarter of them, too."""
    epochs: int = 0
    """Passes over the data; 0 takes each method's own."""
    processes: int = 2
    """Runs at a time."""
    data_dir: Path | None = None
    """Folder with MNIST (or CONCORD_DATA); downloaded if there is none."""
    output: Path = DEFAULT_OUTPUT
    """Folder for tables and figures, and for what was trained already."""
    # fmt: on


class _Reporting:
    """Runs that the parts of the report share, each trained once."""

    def __init__(self, options: ColoredMNISTReport, info: Callable[[str], None]) -> None:
        self.options = options
        self.info = info
        self.folder = options.output / "reports" / "colored-mnist"

    def config(self, method: str, **changes: Any) -> ColoredMNISTConfig:
        options = {"examples": self.options.examples, **METHODS[method], **changes}
        options |= {} if self.options.data_dir is None else {"data_dir": self.options.data_dir}
        options |= {"epochs": self.options.epochs} if self.options.epochs else {}
        return job.config.with_options(**options)

    def train(self, configs: Mapping[str, ColoredMNISTConfig]) -> dict[str, list[list[dict[str, float]]]]:
        """The metrics of all evaluations of each seed's run, by the name of the configuration."""
        seeds = {
            name: [config.with_options(seed=self.options.first_seed + seed) for seed in range(self.options.seeds)]
            for name, config in configs.items()
        }
        return histories(
            job, seeds, self.folder / "runs.jsonl", self.info,
            shown="ood_accuracy", file=__file__, processes=self.options.processes,
        )  # fmt: skip

    def draw(self, figure: Any, name: str) -> str:
        return str(save(figure, self.folder / f"{name}.png"))


def report(options: ColoredMNISTReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """What the options ask for; runs that were made already are not made again."""
    for option in ("seeds", "processes", "examples"):
        if getattr(options, option) < 1:
            raise InputError(f"--{option} {getattr(options, option)}: must be at least 1")
    reporting = _Reporting(options, info)
    result: dict[str, Any] = {"figures": {}}
    for part in options.parts:
        tables, figures = _PARTS[part](reporting)
        result |= tables
        result["figures"] |= figures
    return result


def table_1(reporting: _Reporting) -> tuple[dict[str, Any], dict[str, str]]:
    """Table 1 and figure 3: all methods."""
    runs = reporting.train({method: reporting.config(method) for method in METHODS})
    figure = flips_figure({"": {method: by_flip(each) for method, each in runs.items()}})
    return {"table 1": at_flips(runs, PAPER_1)}, {"figure 3": reporting.draw(figure, "flips")}


def table_2(reporting: _Reporting) -> tuple[dict[str, Any], dict[str, str]]:
    """Table 2: more classes."""
    own = {("meta-irm", classes): changes for classes, changes in META_IRM_CLASSES.items()}
    configs = {
        f"{method}, {classes} classes": reporting.config(method, classes=classes, **own.get((method, classes), {}))
        for method, classes in PAPER_2
    }
    runs = reporting.train(configs)
    rows = {}
    for (name, each), paper in zip(runs.items(), PAPER_2.values(), strict=True):
        ours = {"train": "train_accuracy", "p_e = .9": "ood_accuracy"}
        rows[name] = {column: _percent([run[-1][metric] for run in each]) for column, metric in ours.items()}
        rows[f"{name}, paper"] = dict(zip(ours, paper, strict=True))
    return {"table 2": rows}, {}


def table_3(reporting: _Reporting) -> tuple[dict[str, Any], dict[str, str]]:
    """Table 3, figures 5 and 6: fewer examples."""
    sizes = [reporting.options.examples // part for part in PARTS_OF_EXAMPLES]
    runs = reporting.train(
        {f"{method}, {size}": reporting.config(method, examples=size) for method in PAPER_3 for size in sizes}
    )
    panels = {
        method: {f"{size:,} examples": by_flip(runs[f"{method}, {size}"]) for size in sizes} for method in PAPER_3
    }
    curves = {
        f"{size:,} examples": [
            [(evaluation["epoch"] / run[-1]["epoch"], _penalty(evaluation)) for evaluation in run]
            for run in runs[f"irm, {size}"]
        ]
        for size in sizes
    }
    table = at_flips({method: runs[f"{method}, {sizes[1]}"] for method in PAPER_3}, PAPER_3)
    figures = {
        "figure 5": reporting.draw(flips_figure(panels), "sizes"),
        "figure 6": reporting.draw(penalty_figure(curves), "penalty"),
    }
    return {"table 3": table}, figures


def table_4(reporting: _Reporting) -> tuple[dict[str, Any], dict[str, str]]:
    """Table 4 and figure 8: a second shortcut."""
    own = {"meta-irm": META_IRM_PATCHES}
    runs = reporting.train(
        {method: reporting.config(method, patch_flips=PATCHES, **own.get(method, {})) for method in PAPER_4}
    )
    figure = flips_figure({"colour and patch": {method: by_flip(each) for method, each in runs.items()}})
    return {"table 4": at_flips(runs, PAPER_4)}, {"figure 8": reporting.draw(figure, "patches")}


def table_5(reporting: _Reporting) -> tuple[dict[str, Any], dict[str, str]]:
    """Table 5: parts of meta-IRM left out."""
    runs = reporting.train({name: reporting.config("meta-irm", **changes) for name, changes in ABLATIONS.items()})
    return {"table 5": at_flips(runs, PAPER_5)}, {}


def gap(reporting: _Reporting) -> tuple[dict[str, Any], dict[str, str]]:
    """Figure 4: label noise that differs between the training environments."""
    methods = ("irm", "meta-irm")
    runs = reporting.train(
        {f"{method}, gap {gap}": reporting.config(method, noise_gap=gap) for method in methods for gap in GAPS}
    )
    lines = {
        method: {gap: [run[-1]["ood_accuracy"] for run in runs[f"{method}, gap {gap}"]] for gap in GAPS}
        for method in methods
    }
    rows = {method: {f"gap {gap}": _percent(values) for gap, values in each.items()} for method, each in lines.items()}
    figure = band_figure(lines, "gap between the environments' label noise", "test accuracy at p_e = .9")
    return {"noise gap": rows}, {"figure 4": reporting.draw(figure, "gap")}


def similarity(reporting: _Reporting) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures 9 (without the spread of meta-losses, as in the paper) and 10."""
    configs = {method: reporting.config(method, similarity=True) for method in ("irm", "meta-irm")}
    runs = reporting.train({**configs, "adapted": configs["meta-irm"].with_options(penalty_weight=0.0)})
    flips = (*job.config.observed_flips, job.config.test_flip)
    lines = {
        method: {flip: [run[-1][f"pwcca_{flip:g}"] for run in runs[method]] for flip in flips} for method in configs
    }
    layers: dict[str, list[float]] = {}
    for run in runs["adapted"]:
        for name, value in run[-1].items():
            if name.startswith("pwcca_adapted_"):
                layers.setdefault(f"layer {int(name.split('_')[2]) + 1}", []).append(value)
    figures = {
        "figure 9": reporting.draw(layers_figure(layers), "layers"),
        "figure 10": reporting.draw(
            band_figure(lines, "p_e of the test", "PWCCA similarity with p_e = .1"), "similarity"
        ),
    }
    rows = {
        method: {f"p_e = {flip:g}": with_spread(values, 3) for flip, values in each.items()}
        for method, each in lines.items()
    }
    return {
        "similarity": rows,
        "before and after": {name: with_spread(values, 3) for name, values in layers.items()},
    }, figures


_PARTS: dict[str, Callable[[_Reporting], tuple[dict[str, Any], dict[str, str]]]] = {
    "table-1": table_1,
    "table-2": table_2,
    "table-3": table_3,
    "table-4": table_4,
    "table-5": table_5,
    "gap": gap,
    "similarity": similarity,
}


def by_flip(runs: Sequence[Sequence[Mapping[str, float]]]) -> dict[float, list[float]]:
    """Each run's accuracy at its end, at each p_e."""
    accuracies: dict[float, list[float]] = {}
    for run in runs:
        for name, value in run[-1].items():
            measure, _, part = name.partition("/")
            if measure == "accuracy" and "/" in part and part.split("/")[1].startswith(("flip-", "ood-")):
                accuracies.setdefault(float(part.rsplit("-", 1)[1]), []).append(value)
    return dict(sorted(accuracies.items()))


def at_flips(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], paper: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, str]]:
    """Ours and the paper's accuracies at p_e = .1, .2 and .9, in per cent."""
    rows = {}
    for name, each in runs.items():
        accuracies = by_flip(each)
        flips = (0.1, 0.2, 0.9)
        rows[name] = {f"p_e = {flip:g}": _percent(accuracies[flip]) for flip in flips}
        rows[f"{name}, paper"] = {f"p_e = {flip:g}": text for flip, text in zip(flips, paper[name], strict=True)}
    return rows


def _penalty(evaluation: Mapping[str, float]) -> float:
    slopes = [value for name, value in evaluation.items() if name.startswith("scale_slope/train/")]
    return statistics.mean(slope**2 for slope in slopes)


def _percent(values: Sequence[float]) -> str:
    return with_spread([100 * value for value in values], 1)


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=ColoredMNISTConfig().with_options(
        held_out=1 / 6,
        precision="bfloat16",
        objective="irm",
        penalty_warmup=0.4,
        epochs=80,
        batch_size=5000,
        lr=2e-3,
        milestones=(),
    ),
    measures={"accuracy": correct, "scale_slope": scale_slope},
    criterion="held_out_spread",
    mode="min",
    required=required,
    final_measures=similarities,
    reproduces="meta-IRM paper, section 4 and A (Colored MNIST): Tables 1, 3 and Fig. 3, 5, 6, 9; Tables 2, 4 and "
    "Fig. 4, 8 but for meta-IRM; not Table 5 and Fig. 10",
    report=Report(ColoredMNISTReport, report),
)
