"""Scikit-learn's digits in domains, each with a code of its own beside the image that tells the digit.

The shortcuts of the synthetic task on real images: all domains share only the image. ``concord train digits`` trains
with the AND-mask, ``--aggregator mean`` is the baseline; ``concord compare digits`` has all rules, in 3, 5 and 10
domains.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from concord.models.mlp_options import MLPOptions
from concord.options import OptionGroup, group, option_values
from concord.training import Comparison, Job, TrainConfig

# With PyTorch, which takes seconds: help and a wrong option do without.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from concord.environments import Environments

PIXELS, CLASSES = 64, 10
TEST, VALIDATION = 0.2, 0.2  # of the images


@dataclass(frozen=True, kw_only=True)
class CodedDomains(OptionGroup):
    """Domains of labelled examples, each with a code of its own for each label beside the inputs: a shortcut."""

    # fmt: off
    domains: int = 10
    """Number of training domains, among which the images are divided."""
    validation_domains: int = 2
    """Number of validation domains, with their own codes, which select models without the test."""
    code_dimensions: int = 32
    """Length of a domain's code for a digit; 0: no shortcut."""
    code_scale: float = 1.0
    """Standard deviation of the codes' numbers; pixels lie in [0, 1]."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(0, "validation_domains", "code_dimensions", "code_scale")

    def environments(self, inputs: "Tensor", targets: "Tensor", seed: int) -> "Environments":
        """Training and validation domains, and ``ood``, where every example has its own code."""
        import torch

        from concord.environments import Environments
        from concord.environments.collection import generator_for

        order = torch.randperm(len(targets), generator=generator_for(seed, "domains"))
        tests = round(TEST * len(order))
        validates = round(VALIDATION * len(order)) if self.validation_domains else 0
        most = len(order) - tests - validates
        self.require("domains", 1 <= self.domains <= most, f"must lie in [1, {most}], the examples that train")
        expected = f"must be at most {validates}, the examples for validation"
        self.require("validation_domains", self.validation_domains <= validates, expected)
        train = [f"domain-{index:03d}" for index in range(self.domains)]
        validation = [f"validation-{index:03d}" for index in range(self.validation_domains)]
        parts = {"ood": order[:tests]}
        parts |= {name: order[tests:-most][index :: len(validation)] for index, name in enumerate(validation)}
        parts |= {name: order[-most:][index :: len(train)] for index, name in enumerate(train)}

        def load(name: str) -> "tuple[Tensor, Tensor]":
            labels, generator = targets[parts[name]], generator_for(seed, "codes", name)
            rows = len(labels) if name == "ood" else int(targets.max()) + 1
            codes = torch.randn(rows, self.code_dimensions, generator=generator) * self.code_scale
            return torch.cat([inputs[parts[name]], codes if name == "ood" else codes[labels]], 1), labels

        return Environments(load, train, validation, ["ood"])


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(TrainConfig):
    """Scikit-learn's digits, 8 × 8 pixels, in domains with a shortcut each."""

    auto_aggregator = "and-mask"

    coded: CodedDomains = group(CodedDomains)
    mlp: MLPOptions = group(MLPOptions)


@functools.lru_cache(maxsize=1)
def digits() -> "tuple[Tensor, Tensor]":
    """Pixels ``(1797, 64)`` in [0, 1] and digits, read once a process."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target).long()


def environments(config: DigitsConfig) -> "Environments":
    """The domains, and a test in which every image has its own code."""
    return config.coded.environments(*digits(), config.run.seed)


def model(config: DigitsConfig) -> "nn.Module":
    """An MLP with LeakyReLU."""
    from concord.models import MLP

    return MLP(PIXELS + config.coded.code_dimensions, CLASSES, **option_values(config.mlp))


def loss(outputs: "Tensor", targets: "Tensor") -> "Tensor":
    """Cross entropy."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets)


METHODS: dict[str, dict[str, Any]] = {
    "and-mask": {},
    "all agree": {"threshold": 1.0},
    "momentum by environment": {"threshold": 1.0, "environment_momentum": 0.9},
    "4 steps an update": {"threshold": 1.0, "steps_per_update": 4},
    "geometric-mean": {"aggregator": "geometric-mean"},
    "sand-mask": {"aggregator": "sand-mask"},
    "t-mask": {"aggregator": "t-mask", "environment_momentum": 0.9},
    "vrex": {"objective": "vrex", "aggregator": "mean", "penalty_weight": 10.0},
    "mean": {"aggregator": "mean"},
}
DOMAINS = Comparison(
    {
        f"{method}, {domains} domains": {**options, "domains": domains, "evaluations": 1}
        for domains in (3, 5, 10)
        for method, options in METHODS.items()
    },
    seeds=5,
    first_seed=101,
    columns={"o.o.d.": "ood_accuracy", "validation": "validation_accuracy", "held out": "held_out_accuracy"},
    title="few domains with a shortcut each",
)

job = Job(
    environments=environments,
    model=model,
    loss=loss,
    config=DigitsConfig().with_options(epochs=100, batch_size=64, hidden_layers=2),
    criterion="validation_accuracy",
    reproduces="no paper's result: real images with the synthetic task's shortcuts, few domains",
    comparisons={"domains": DOMAINS},
)
