"""PunctuatedSST-2: a mark at a sentence's end that misleads in the test (Bae et al., Meta-Learned IRM, appendix B).

The paper embeds words with GloVe vectors: give their file with ``--glove``. Without one they are learned with the
rest, which is another model. ``--no-punctuate`` leaves the marks out, the paper's "grayscale".

``concord report punctuated-sst2`` makes the paper's table over seeds, with the settings of ``METHODS``.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from concord.analysis.spread import with_spread
from concord.environments import SST2, Environments, PunctuatedSST2
from concord.environments.punctuated_sst2 import read_glove, vocabulary
from concord.errors import InputError
from concord.models import WordAverage
from concord.options import option_values
from concord.training import Job, Report, TrainConfig
from concord.training.options import DEFAULT_OUTPUT
from concord.training.sweep import histories


@dataclass(frozen=True, kw_only=True)
class PunctuatedSST2Config(TrainConfig):
    """PunctuatedSST-2: two training environments whose final mark misleads seldom, and a test where it does often."""

    # fmt: off
    glove: Path | None = None
    """File of GloVe vectors; without one the words' vectors are learned."""
    embedding_size: int | None = None
    """Size of the words' vectors; that of the file, or 100."""
    flips: tuple[float, ...] = (0.1, 0.2)
    """How often the mark misleads in each training environment, p_e."""
    test_flip: float = 0.9
    """How often it misleads in the test."""
    noise: float = 0.25
    """How often the label is wrong, η."""
    punctuate: bool = True
    """Put the marks at the ends of the sentences."""
    hidden_units: int = 128
    """Width of the hidden layers."""
    hidden_layers: int = 1
    """Number of hidden layers."""
    dropout: float = 0.0
    """Dropout probability of the hidden layers."""
    # fmt: on

    def check(self) -> None:
        """Also refuse what makes no network."""
        super().check()
        self.require("dropout", 0 <= self.dropout < 1, "must lie in [0, 1)")
        for option in ("hidden_units", "hidden_layers", "embedding_size"):
            value = option_values(self)[option]
            self.require(option, value is None or value >= 1, "must be at least 1")


@functools.lru_cache(maxsize=1)
def sentences(data_dir: Path | None) -> tuple[SST2, dict[str, int]]:
    """SST-2 and the numbers of its training words, read once a process."""
    data = SST2.read(data_dir)
    return data, vocabulary([data.train])


@functools.lru_cache(maxsize=1)
def vectors(glove: Path, data_dir: Path | None, size: int | None) -> torch.Tensor:
    """The words' vectors from the file; words that it does not have, and the padding, are 0."""
    _, numbers = sentences(data_dir)
    found, size = read_glove(glove, list(numbers), size)
    table = torch.zeros(2 + len(numbers), size)
    for word, vector in found.items():
        table[numbers[word]] = vector
    return table


def environments(config: PunctuatedSST2Config) -> Environments:
    """The punctuated sentences."""
    data, numbers = sentences(config.data.data_dir)
    return PunctuatedSST2(
        data,
        numbers,
        flips=config.flips,
        test_flip=config.test_flip,
        noise=config.noise,
        punctuate=config.punctuate,
        seed=config.run.seed,
    ).as_environments()


def model(config: PunctuatedSST2Config) -> nn.Module:
    """The average of the words' vectors, and an MLP with ReLU."""
    _, numbers = sentences(config.data.data_dir)
    table = None if config.glove is None else vectors(config.glove, config.data.data_dir, config.embedding_size)
    size = table.shape[1] if table is not None else config.embedding_size or 100
    words, layers = 2 + len(numbers), (config.hidden_units, config.hidden_layers)
    return WordAverage(words, size, 2, *layers, config.dropout, table)


# What each method is trained with by the report; docs/objectives.md says what chose it.
_SHARED: dict[str, Any] = {"epochs": 60, "batch_size": 1000, "evaluations": 12}
_ERM = {"objective": "erm", "aggregator": "mean", "epochs": 40, "batch_size": 500, "evaluations": 12}
METHODS: dict[str, dict[str, Any]] = {
    "erm": _ERM,
    "irm": {**_SHARED, "objective": "irm", "penalty_weight": 1e4, "penalty_warmup": 0.15, "lr": 1e-2},
    "meta-irm": {
        **_SHARED,
        "objective": "meta-irm",
        "inner_lr": 1.5,
        "penalty_weight": 3.0,
        "penalty_warmup": 0.0,
        "lr": 5e-3,
        "stop_spread": 0.001,
        "stop_from": 0.5,
    },
    "erm, no marks": {**_ERM, "punctuate": False},
}
# The paper's test accuracies at p_e = .9 in per cent, by η.
PAPER_6 = {
    "erm": {0.25: "30.7 ± 1.5", 0.0: "56.2 ± 2.9"},
    "irm": {0.25: "62.0 ± 1.9", 0.0: "67.4 ± 1.4"},
    "meta-irm": {0.25: "62.2 ± 1.8", 0.0: "73.0 ± 0.7"},
    "erm, no marks": {0.25: "62.3 ± 0.5", 0.0: "76.7 ± 2.7"},
}


@dataclass(frozen=True, kw_only=True)
class PunctuatedSST2Report:
    """Table 6 of the meta-IRM paper, over seeds, beside the paper's numbers."""

    # fmt: off
    seeds: int = 10
    """How many seeds of the data and the first weights."""
    first_seed: int = 2
    """The first of them; the settings were chosen with seed 0."""
    glove: Path | None = None
    """File of GloVe vectors; without one the words' vectors are learned."""
    epochs: int = 0
    """Passes over the data; 0 takes each method's own."""
    processes: int = 2
    """Runs at a time."""
    data_dir: Path | None = None
    """Folder with the files of SST-2 (or CONCORD_DATA)."""
    output: Path = DEFAULT_OUTPUT
    """Folder for what was trained already."""
    # fmt: on


def report(options: PunctuatedSST2Report, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Table 6; runs that were made already are not made again."""
    for option in ("seeds", "processes"):
        if getattr(options, option) < 1:
            raise InputError(f"--{option} {getattr(options, option)}: must be at least 1")
    given = {"data_dir": options.data_dir, "glove": options.glove, "epochs": options.epochs or None}
    common = {name: value for name, value in given.items() if value is not None}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    configs = {
        f"{method}, η = {noise:g}": [
            job.config.with_options(**{**settings, **common}, noise=noise, seed=seed) for seed in seeds
        ]
        for method, settings in METHODS.items()
        for noise in PAPER_6[method]
    }
    words = (
        "learned vectors; the paper has GloVe's (--glove)" if options.glove is None else f"vectors of {options.glove}"
    )
    info(f"words: {words}")
    runs = histories(
        job, configs, options.output / "reports" / "punctuated-sst2" / "runs.jsonl", info,
        shown="ood_accuracy", file=__file__, processes=options.processes,
    )  # fmt: skip
    columns = {"train": "train_accuracy", "held out": "held_out_accuracy", "p_e = .9": "ood_accuracy"}
    rows: dict[str, dict[str, str]] = {}
    for method, paper in PAPER_6.items():
        for noise, text in paper.items():
            ended = [run[-1] for run in runs[f"{method}, η = {noise:g}"]]
            rows[f"{method}, η = {noise:g}"] = {
                column: with_spread([100 * metrics[metric] for metrics in ended], 1)
                for column, metric in columns.items()
            } | {"p_e = .9, paper": text}
    return {"table 6": rows, "words": words}


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=PunctuatedSST2Config().with_options(objective="irm"),
    reproduces="meta-IRM paper, appendix B (PunctuatedSST-2): Table 6 for ERM, not for IRMv1 and meta-IRM",
    report=Report(PunctuatedSST2Report, report),
)
