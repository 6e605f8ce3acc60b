"""PunctuatedSST-2: the words of a sentence show its sentiment everywhere; the mark at its end misleads."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from concord.environments import Environments
from concord.environments.collection import generator_for
from concord.environments.files import data_folders, find
from concord.environments.label_noise import misled, require_probabilities
from concord.errors import ArgumentError, InputError
from concord.options import OptionGroup
from concord.storage import display_path

PADDING, UNKNOWN = 0, 1
_MARKS = ("!", ".")
_FILES = ("train.tsv", "test.tsv")
_HOME = "https://github.com/clairett/pytorch-sentiment-classification (data/SST2)"


@dataclass(frozen=True)
class Sentences:
    """The words of sentences, without a mark at the end, and their sentiments, ``(sentences,)`` int64, 0 or 1."""

    words: tuple[tuple[str, ...], ...]
    labels: Tensor


@dataclass(frozen=True)
class SST2:
    """The Stanford Sentiment Treebank's whole sentences with two classes: 6,920, 1,821 and 872."""

    train: Sentences
    test: Sentences
    dev: Sentences | None = None

    @property
    def parts(self) -> tuple[Sentences, ...]:
        """All sentences that are there."""
        return self.train, self.test, *([] if self.dev is None else [self.dev])

    @staticmethod
    def read(folder: Path | None) -> "SST2":
        """Read the files in a folder or its ``sst2``: lines of a sentence, a tab and a label, 0 or 1.

        ``dev.tsv`` may be missing.
        """
        if folder is None:
            raise ArgumentError(
                "data",
                None,
                f"needed; give a folder with {', '.join(_FILES)} of SST-2 (sentence, tab, label), "
                f"for example from {_HOME}",
            )
        found = {name: find([name], data_folders("sst2", folder)) for name in _FILES}
        missing = [name for name, path in found.items() if path is None]
        if missing:
            raise ArgumentError(
                "data",
                display_path(folder),
                f"{', '.join(missing)} not there, nor in its folder sst2; SST-2 is for example at {_HOME}",
            )
        paths = [*found.values(), find(["dev.tsv"], data_folders("sst2", folder))]
        return SST2(*(_read(path) for path in paths if path is not None))


def _read(path: Path) -> Sentences:
    words, labels = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        sentence, tab, label = line.rpartition("\t")
        if not tab or label.strip() not in {"0", "1"}:
            raise InputError(f"{path}, line {number}: expected a sentence, a tab and 0 or 1, found {line[-40:]!r}")
        words.append(tuple(re.sub(r"[\s.!?]+$", "", sentence.lower()).split()))
        labels.append(int(label))
    if not words:
        raise InputError(f"{path}: has no sentence")
    return Sentences(tuple(words), torch.tensor(labels))


def vocabulary(*parts: Sentences) -> dict[str, int]:
    """A number from 2 on for each word of these sentences (0 pads, 1 is any other word), and for the two marks."""
    known = sorted({word for part in parts for words in part.words for word in words} - set(_MARKS))
    return {word: number for number, word in enumerate([*_MARKS, *known], UNKNOWN + 1)}


@dataclass(frozen=True, kw_only=True)
class PunctuationOptions(OptionGroup):
    """Marks that mislead seldom in the training environments, and often in the test."""

    # fmt: off
    flips: tuple[float, ...] = (0.1, 0.2)
    """Probability p_e that the mark misleads, for each training environment."""
    test_flip: float = 0.9
    """Probability that the mark misleads in the test."""
    validation_flip: float | None = None
    """Probability that the mark misleads in a validation environment, the sentences of dev.tsv; by default there is
    none."""
    noise: float = 0.25
    """Probability η of a wrong label."""
    punctuate: bool = True
    """Add the marks at the ends of the sentences."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        require_probabilities(flips=self.flips, test_flip=self.test_flip, noise=self.noise)
        if self.validation_flip is not None:
            require_probabilities(validation_flip=self.validation_flip)


@dataclass(frozen=True)
class PunctuatedSST2(PunctuationOptions):
    """Environments of sentences that differ in how often the mark at the end misleads.

    The label is wrong with probability η. The mark is ``!`` for label 0 and ``.`` for label 1, but with probability
    p_e the other one. Choe et al., An Empirical Study of Invariant Risk Minimization, 2020; Bae et al., Meta-Learned
    Invariant Risk Minimization, 2021, appendix B.

    Args:
        data: the sentences; those to train on are divided at random among the training environments.
        numbers: the words' numbers, see :func:`vocabulary`.
        other: the number of words without one; 0 leaves them out.
        seed: seed of the choice, the noise and the marks.
    """

    data: SST2
    numbers: dict[str, int]
    other: int = UNKNOWN
    seed: int = 0

    def as_environments(self) -> Environments:
        """Training environments ``train-0-0.1 …``, the test ``ood-0.9``, and perhaps ``validation-0.5``.

        Inputs are ``(sentences, most words + 1)`` int64, the numbers of the words and of the mark, padded with 0.
        """
        names = [f"train-{index}-{flip:g}" for index, flip in enumerate(self.flips)]
        order = torch.randperm(len(self.data.train.labels), generator=generator_for(self.seed, "sst2"))
        others = {f"ood-{self.test_flip:g}": (self.data.test, self.test_flip)}
        validation = []
        if self.validation_flip is not None:
            if self.data.dev is None:
                raise ArgumentError("validation_flip", self.validation_flip, "needs dev.tsv of SST-2 beside train.tsv")
            validation = [f"validation-{self.validation_flip:g}"]
            others[validation[0]] = (self.data.dev, self.validation_flip)

        def load(name: str) -> tuple[Tensor, Tensor]:
            if name in others:
                part, flip = others[name]
                return self._punctuated(name, part, torch.arange(len(part.labels)), flip)
            index = names.index(name)
            return self._punctuated(name, self.data.train, order[index :: len(names)], self.flips[index])

        return Environments(load, names, validation, test=[f"ood-{self.test_flip:g}"])

    def _punctuated(self, name: str, part: Sentences, chosen: Tensor, flip: float) -> tuple[Tensor, Tensor]:
        labels = misled(part.labels[chosen], 2, self.noise, self.seed, name, "noise")
        marks = misled(labels, 2, flip, self.seed, name, "marks")
        # The longest sentence of all parts, so that all environments have the same length.
        most = 1 + max(len(words) for each in self.data.parts for words in each.words)
        inputs = torch.full((len(chosen), most), PADDING)
        for row, (index, mark) in enumerate(zip(chosen.tolist(), marks.tolist(), strict=True)):
            numbers = (self.numbers.get(word, self.other) for word in part.words[index])
            words = [number for number in numbers if number != PADDING]
            words += [self.numbers[_MARKS[mark]]] if self.punctuate else []
            inputs[row, : len(words)] = torch.tensor(words, dtype=torch.long)
        return inputs, labels


def read_glove(path: Path, words: Sequence[str], size: int | None = None) -> tuple[dict[str, Tensor], int]:
    """The vectors of these words in a GloVe file (lines of a word and its numbers), float32, and their size."""
    wanted, found = set(words), {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                word, _, values = line.rstrip().partition(" ")
                numbers = values.count(" ") + 1
                size = numbers if size is None else size
                if numbers != size:
                    raise ArgumentError("glove", path, f"line {number} has {numbers} numbers, expected {size}")
                if word in wanted:
                    found[word] = torch.tensor([float(value) for value in values.split(" ")])
    except (OSError, ValueError) as error:
        raise ArgumentError("glove", path, f"cannot be read as GloVe vectors ({error})") from error
    if not found or not size:
        raise ArgumentError("glove", path, f"has none of the {len(wanted)} words")
    return found, size
