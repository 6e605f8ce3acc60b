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
from concord_jobs.punctuated_sst2.data import (
    PADDING,
    SST2,
    PunctuatedSST2,
    PunctuationOptions,
    Sentences,
    read_glove,
    vocabulary,
)
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
def sentences(folder: Path | None) -> SST2:
    """SST-2, read once in each process."""
    return SST2.read(folder)


@functools.lru_cache(maxsize=1)
def embedded(glove: Path, folder: Path | None, size: int | None) -> tuple[dict[str, int], torch.Tensor]:
    """The numbers of the words of all sentences that the file has, and of the two marks, and their vectors."""
    found, size = read_glove(glove, list(vocabulary(*sentences(folder).parts)), size)
    numbers = vocabulary(Sentences((tuple(found),), torch.zeros(1)))
    table = torch.zeros(2 + len(numbers), size)
    for word, vector in found.items():
        table[numbers[word]] = vector
    return numbers, table


def environments(config: PunctuatedSST2Config) -> Environments:
    """The punctuated sentences. Words that the file of vectors lacks are left out, as in Choe et al.'s code."""
    data, of = sentences(config.data.data), {"seed": config.run.seed, **option_values(config.marks)}
    if config.glove is None:
        return PunctuatedSST2(data, vocabulary(data.train), **of).as_environments()
    numbers, _ = embedded(config.glove, config.data.data, config.embedding_size)
    return PunctuatedSST2(data, numbers, other=PADDING, **of).as_environments()


def model(config: PunctuatedSST2Config) -> nn.Module:
    """The average of the words' vectors, and an MLP with ReLU."""
    if config.glove is None:
        words, size, table = 2 + len(vocabulary(sentences(config.data.data).train)), config.embedding_size or 100, None
    else:
        _, table = embedded(config.glove, config.data.data, config.embedding_size)
        words, size = table.shape
    return WordAverage(words, size, 2, **option_values(config.mlp), vectors=table)


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
