"""PunctuatedSST-2: a mark at a sentence's end that misleads in the test (Bae et al., Meta-Learned IRM, appendix B).

The paper embeds words with GloVe vectors: give their file with ``--glove``. Without a file the vectors are learned with
the rest, which is another model. ``--no-punctuate`` leaves out the marks, the paper's "grayscale".

``concord compare punctuated-sst2`` makes the paper's table over seeds.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from concord.environments import Environments
from concord.models.mlp_options import MLPOptions
from concord.options import group, option_values
from concord.space import Choice, Entry, LogUniform, Space, Uniform
from concord.training import Job, Study, TrainConfig
from concord_jobs.punctuated_sst2.data import SST2, PunctuatedSST2, PunctuationOptions, read_glove, vocabulary
from concord_jobs.punctuated_sst2.word_average import WordAverage


@dataclass(frozen=True, kw_only=True)
class PunctuatedSST2Config(TrainConfig):
    """PunctuatedSST-2: two training environments whose final mark misleads seldom, and a test where it does often."""

    # fmt: off
    glove: Path | None = None
    """File of GloVe vectors; by default the model learns the words' vectors."""
    embedding_size: int | None = None
    """Size of the words' vectors; by default the file's, or 100."""
    marks: PunctuationOptions = group(PunctuationOptions)
    mlp: MLPOptions = group(MLPOptions)
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(1, "embedding_size")


@functools.lru_cache(maxsize=1)
def sentences(folder: Path | None) -> tuple[SST2, dict[str, int]]:
    """SST-2 and the numbers of its training words, read once in each process."""
    data = SST2.read(folder)
    return data, vocabulary(data.train)


@functools.lru_cache(maxsize=1)
def vectors(glove: Path, folder: Path | None, size: int | None) -> torch.Tensor:
    """The words' vectors from the file; padding and words that the file lacks are 0."""
    _, numbers = sentences(folder)
    found, size = read_glove(glove, list(numbers), size)
    table = torch.zeros(2 + len(numbers), size)
    for word, vector in found.items():
        table[numbers[word]] = vector
    return table


def environments(config: PunctuatedSST2Config) -> Environments:
    """The punctuated sentences."""
    data, numbers = sentences(config.data.data)
    return PunctuatedSST2(data, numbers, seed=config.run.seed, **option_values(config.marks)).as_environments()


def model(config: PunctuatedSST2Config) -> nn.Module:
    """The average of the words' vectors, and an MLP with ReLU."""
    _, numbers = sentences(config.data.data)
    table = None if config.glove is None else vectors(config.glove, config.data.data, config.embedding_size)
    size = table.shape[1] if table is not None else config.embedding_size or 100
    return WordAverage(2 + len(numbers), size, 2, **option_values(config.mlp), vectors=table)


# Judged by the accuracy on sentences whose mark says nothing, which are not those of the test.
_VARIED: dict[str, Entry] = {
    "validation_flip": 0.5,
    "batch_size": 1000,
    "epochs": Choice(60, 240),
    "lr": LogUniform(1e-3, 3e-2),
    "milestones": (),
    "l2": LogUniform(1e-6, 1e-2),
    "regularization": "coupled",
}
_IRM: dict[str, Entry] = {
    "objective": "irm", "penalty_weight": LogUniform(10.0, 1e6), "penalty_warmup": Uniform(0.0, 0.6),
}  # fmt: skip
_META_IRM: dict[str, Entry] = {
    "objective": "meta-irm",
    "penalty_weight": LogUniform(0.01, 30.0),
    "penalty_warmup": 0.0,
    "inner_lr": LogUniform(0.05, 10.0),
    "drop_grad": Choice(0.0, 0.1, 0.2, 0.4),
}
STUDIES = {
    "irm": Study(Space(_VARIED | _IRM)),
    "meta-irm": Study(Space(_VARIED | _META_IRM)),
}

job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=PunctuatedSST2Config().with_options(objective="irm", hidden_units=128),
    studies=STUDIES,
    reproduces="meta-IRM paper, appendix B (PunctuatedSST-2): Table 6",
    comparisons="tables.py",
)
