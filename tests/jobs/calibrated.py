"""A job with its own objective and evaluation: learned temperatures, and the calibration error."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from concord.environments import Environment, Environments
from concord.objectives import Objective
from concord.training import EnvironmentEvaluation, Job


class Temperatures(nn.Module):
    """The logarithm of a temperature for each environment."""

    def __init__(self, environments: int) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(environments))


class Tempered(Objective):
    """The mean of R_e / t_e + log t_e: environments with a high risk get a high temperature t_e."""

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        self.module = Temperatures(environments)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=steps)

    def terms(
        self, model: nn.Module, batch: object, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.module, Temperatures)
        risks, weights = self.risks(model, batch, step)
        logs = self.module.logs if own is None else self.module.logs[list(own)]
        return risks / logs.exp() + logs, weights


def examples(name: str) -> tuple[Tensor, Tensor]:
    """Three classes; environments have different sizes and noise."""
    generator = torch.Generator().manual_seed(ord(name))
    targets = torch.randint(0, 3, (30 + ord(name) % 7,), generator=generator)
    inputs = torch.randn(len(targets), 5, generator=generator) * (1 + ord(name) % 3)
    inputs[:, 0] += 2.0 * targets
    return inputs, targets


def calibration(model: nn.Module, environment: Environment) -> dict[str, float]:
    """The difference of mean confidence and accuracy, and a random number."""
    confidence, told = model(environment.inputs).softmax(1).max(1)
    error = confidence.mean() - (told == environment.targets).float().mean()
    return {"calibration_error": abs(error.item()), "drawn": torch.rand(()).item()}


job = Job(
    environments=lambda _: Environments(examples, train=["a", "b", "c", "d"], validation=["u", "v"]),
    model=lambda _: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
    loss=nn.functional.cross_entropy,
    objective=lambda _: Tempered(nn.functional.cross_entropy),
    evaluation=EnvironmentEvaluation(calibration, {"calibration_error": "min", "drawn": None}),
    criterion="validation_calibration_error",
)
