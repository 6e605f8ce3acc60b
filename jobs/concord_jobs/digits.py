"""Scikit-learn's digits in domains, each with a code of its own beside the image that tells the digit.

The synthetic task's shortcuts on real images: what all domains share is the image. ``concord train digits`` trains with
the AND-mask, ``--aggregator mean`` gives the baseline.
"""

import functools
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from concord.environments import CodedDomains, Environments
from concord.models import MLP
from concord.models.mlp_options import MLPOptions
from concord.options import option_values
from concord.training import Job, TrainConfig

PIXELS, CLASSES = 64, 10


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(TrainConfig):
    """Scikit-learn's digits, 8 × 8 pixels, in domains with a shortcut each."""

    # fmt: off
    domains: int = 10
    """Training domains; the images are dealt out to them."""
    validation_domains: int = 2
    """More domains, with codes of their own, to choose models by without looking at the test."""
    code_dimensions: int = 32
    """Numbers of a domain's code for a digit; 0 has no shortcut."""
    code_scale: float = 1.0
    """Their standard deviation; pixels lie in [0, 1]."""
    mlp: MLPOptions = field(default_factory=MLPOptions)
    # fmt: on


CODES = ("domains", "validation_domains", "code_dimensions", "code_scale")


@functools.lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """Pixels ``(1797, 64)`` in [0, 1] and digits, read once a process."""
    data = load_digits()
    return torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target).long()


def environments(config: DigitsConfig) -> Environments:
    """The domains, and a test in which every image has a code of its own."""
    options = {
        name: getattr(config, name) for name in ("domains", "validation_domains", "code_dimensions", "code_scale")
    }
    return CodedDomains(*digits(), **options, seed=config.run.seed).as_environments()


def model(config: DigitsConfig) -> nn.Module:
    """An MLP with LeakyReLU."""
    return MLP(PIXELS + config.code_dimensions, CLASSES, **option_values(config.mlp))


job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=DigitsConfig().with_options(epochs=100, batch_size=64, hidden_layers=2),
    criterion="validation_accuracy",
    reproduces="no paper's result: real images with the synthetic task's shortcuts, few domains",
    comparisons="tables/digits.py",
)
