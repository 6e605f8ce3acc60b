"""Colored MNIST: the shape of a digit shows its class everywhere; the colour misleads, seldom in training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from concord.environments import Environments, LabelledImages
from concord.environments.collection import generator_for
from concord.environments.label_noise import misled, require_probabilities
from concord.errors import ArgumentError, InputError
from concord.options import OptionGroup

_DIGITS = 10
_LARGE_PATCH, _SMALL_PATCH = 3, 2
_BRIGHT = 255


@dataclass(frozen=True, kw_only=True)
class ColourOptions(OptionGroup):
    """Colours that mislead seldom in the training environments, and more in the tests."""

    # fmt: off
    classes: int = 2
    """Number of classes and of colours: 2, 5 or 10."""
    flips: tuple[float, ...] = (0.1, 0.2)
    """Probability p_e that the colour misleads, for each training environment."""
    test_flip: float = 0.9
    """Probability that the colour misleads in the test."""
    observed_flips: tuple[float, ...] = ()
    """Probabilities p_e of further tests, which are only reported."""
    noise: float = 0.25
    """Probability η of a wrong label."""
    noise_gap: float = 0.0
    """Difference of the label noise between first and last training environment, with the same mean."""
    patch_flips: tuple[float, ...] = ()
    """Probability that a second shortcut, a patch in a corner, misleads, for each training environment; or no patch."""
    grey: bool = False
    """Images without colour."""
    side: int = 14
    """Height and width in pixels: 14 or 28."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        if self.classes not in (2, 5, 10):
            raise ArgumentError("classes", self.classes, "must be 2, 5 or 10")
        require_probabilities(
            flips=self.flips, test_flip=self.test_flip, observed_flips=self.observed_flips, patch_flips=self.patch_flips
        )
        if not self.flips:
            raise ArgumentError("flips", self.flips, "gives no training environment")
        if self.patch_flips and (self.classes != 2 or len(self.patch_flips) != len(self.flips)):
            expected = f"give one for each of the {len(self.flips)} training environments, and 2 classes"
            raise ArgumentError("patch_flips", self.patch_flips, expected)
        for value in self.noises():
            if not 0 <= value <= 1:
                expected = f"with a gap of {self.noise_gap}, noise {value} is outside [0, 1]"
                raise ArgumentError("noise", self.noise, expected)
        if self.side not in (14, 28):
            raise ArgumentError("side", self.side, "must be 14 or 28")

    def noises(self) -> list[float]:
        """The label noise of each training environment."""
        steps = max(len(self.flips) - 1, 1)
        return [self.noise + self.noise_gap * (0.5 - index / steps) for index in range(len(self.flips))]


@dataclass(frozen=True, kw_only=True)
class ColoredMNIST(ColourOptions):
    """Environments of coloured digits that differ in how often the colour misleads.

    A digit's class is d·k // 10 for k classes. Labels are noisy: with probability η the label is the next class
    (for two: the other one). The colour is that of the noisy label, but with probability p_e that of the next label.
    Each colour is a channel of the image. Arjovsky et al., Invariant Risk Minimization, 2019, section 5.2 (k = 2); Choe
    et al., An Empirical Study of Invariant Risk Minimization, 2020 (k > 2), and Bae et al., Meta-Learned Invariant Risk
    Minimization, 2021, sections 4.1 to 4.4. For k > 2 the papers do not define how a colour misleads; Choe et al.'s
    published code takes the next label's.

    The patch is 3 × 3 bright pixels in the upper left corner for the noisy label's class 0, 2 × 2 in the lower right
    for class 1. Images with sides of 14 pixels have every second pixel of every second row, as in the code of IRM's
    authors.

    Args:
        train: digits to train on, divided at random among the training environments.
        test: digits of the test, the same in all test environments.
        examples: number of examples of each training environment; 0 takes all.
        seed: seed of the choice, the noise and the colours.
    """

    train: LabelledImages
    test: LabelledImages
    examples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.check()
        if self.train.images.shape[1:] != (1, 28, 28):
            raise InputError(f"MNIST: images of {tuple(self.train.images.shape[1:])}, expected (1, 28, 28)")
        if self.examples < 0 or self.examples * len(self.flips) > len(self.train):
            most = len(self.train) // len(self.flips)
            raise ArgumentError("examples", self.examples, f"there are {most} for each training environment")

    def as_environments(self) -> Environments:
        """Training environments ``train-0.1 …``, the test ``ood-0.9`` and the monitored ones ``flip-0.1 …``."""
        train = {f"train-{flip:g}": index for index, flip in enumerate(self.flips)}
        if len(train) < len(self.flips):
            train = {f"train-{flip:g}-{index}": index for index, flip in enumerate(self.flips)}
        tests = {f"ood-{self.test_flip:g}": self.test_flip}
        monitored = {f"flip-{flip:g}": flip for flip in self.observed_flips}

        def load(name: str) -> tuple[Tensor, Tensor]:
            return self._training(name, train[name]) if name in train else self._test({**tests, **monitored}[name])

        return Environments(load, train, test=tests, monitored=monitored)

    def _training(self, name: str, index: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(self.train), generator=generator_for(self.seed, "colored mnist"))
        each = self.examples or len(self.train) // len(self.flips)
        own = order[index * each : (index + 1) * each]
        digits = LabelledImages(self.train.images[own], self.train.labels[own])
        patch_flip = self.patch_flips[index] if self.patch_flips else None
        return self._coloured(name, digits, self.noises()[index], self.flips[index], patch_flip)

    def _test(self, flip: float) -> tuple[Tensor, Tensor]:
        # The same noise, and nested colours: tests differ in p_e alone.
        return self._coloured("test", self.test, self.noise, flip, flip if self.patch_flips else None)

    def _coloured(
        self, name: str, digits: LabelledImages, noise: float, flip: float, patch_flip: float | None
    ) -> tuple[Tensor, Tensor]:
        """Images ``(examples, colours, side, side)`` uint8, and noisy labels ``(examples,)``."""
        classes = digits.labels * self.classes // _DIGITS
        labels = self._misled(classes, noise, name, "noise")
        colours = self._misled(labels, flip, name, "colours")
        every = digits.images.shape[-1] // self.side
        grey = digits.images[:, 0, ::every, ::every]
        if self.grey:
            images = grey[:, None].clone()
        else:
            images = torch.zeros(len(grey), self.classes, *grey.shape[1:], dtype=torch.uint8)
            images[torch.arange(len(grey)), colours] = grey
        if patch_flip is not None:
            patched = self._misled(labels, patch_flip, name, "patches")
            upper, lower = (patched == 0).nonzero().flatten(), (patched == 1).nonzero().flatten()
            images[upper, :, :_LARGE_PATCH, :_LARGE_PATCH] = _BRIGHT
            images[lower, :, -_SMALL_PATCH:, -_SMALL_PATCH:] = _BRIGHT
        return images, labels

    def _misled(self, labels: Tensor, probability: float, *key: str) -> Tensor:
        return misled(labels, self.classes, probability, self.seed, *key)
