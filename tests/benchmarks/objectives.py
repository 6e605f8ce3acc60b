"""One step of each objective on Colored MNIST's network, against a step of the mean risk on the same batch."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from concord.aggregation import Mean
from concord.benchmark import Row, interleaved
from concord.gradients import StackedGradients
from concord.models import MLP
from concord.objectives import (
    CORAL,
    EQRM,
    IGA,
    Fishr,
    GroupDRO,
    IRMv1,
    MetaIRM,
    Mixup,
    Objective,
    ObjectiveGradients,
    PenaltyWeight,
    SpectralDecoupling,
    VREx,
)
from concord.training.process import tune_process

ENVIRONMENTS, BATCH, WIDTH = 2, 5000, 2 * 14 * 14
TARGETS: dict[type[Objective], str] = {
    GroupDRO: "≤ 1.05",
    EQRM: "≤ 1.05",
    SpectralDecoupling: "≤ 1.05",
    Mixup: "≤ 1.05",
    CORAL: "≤ 1.25",
    Fishr: "≤ 1.5",
    MetaIRM: "≤ 8",
}


def rows() -> Iterator[Row]:
    """A row for each objective; meta-IRM and IGA have second derivatives."""
    tune_process()
    torch.manual_seed(0)
    inputs = torch.rand(ENVIRONMENTS, BATCH, WIDTH)
    targets = torch.randint(0, 2, (ENVIRONMENTS, BATCH))

    def network() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = MLP(WIDTH, 2, 256, 1, activation="relu")
        return model, torch.optim.Adam(model.parameters(), 1e-3)

    plain, plain_optimizer = network()

    def erm_step() -> None:
        plain_optimizer.zero_grad()
        cross_entropy(plain(inputs.flatten(0, 1)), targets.flatten()).backward()
        plain_optimizer.step()

    def step_of(objective: Objective) -> Row:
        model, optimizer = network()
        objective.begin(model, ENVIRONMENTS, 1)
        gradients = ObjectiveGradients(model, objective, ["first", "second"])

        def step() -> Tensor:
            losses = gradients(inputs, targets, 0).losses
            optimizer.step()
            return losses

        seconds, reference, ratio = interleaved(step, erm_step, repeats=20, warmup=3)
        name = f"{type(objective).__name__} step, {ENVIRONMENTS} × {BATCH} examples, MLP of 256"
        return Row(name, seconds, "mean risk", reference, ratio, TARGETS.get(type(objective), ""))

    weight = PenaltyWeight(10.0)
    objectives = (
        IRMv1(cross_entropy, weight),
        VREx(cross_entropy, weight),
        GroupDRO(cross_entropy),
        EQRM(cross_entropy),
        SpectralDecoupling(cross_entropy, weight),
        Mixup(cross_entropy),
        CORAL(cross_entropy, weight),
        Fishr(cross_entropy, weight),
        IGA(cross_entropy, weight),
        MetaIRM(cross_entropy, 0.1, weight=weight),
    )
    yield from map(step_of, objectives)
    yield _small_step()


def _small_step() -> Row:
    """The step of the job irm-regression, whose time is the launch of operations, against the paper's code."""
    inputs, targets = torch.randn(2, 10_000, 4), torch.randn(2, 10_000, 1)
    model, plain = (nn.Linear(4, 1, bias=False) for _ in range(2))
    gradients = StackedGradients(model, IRMv1(mse_loss, PenaltyWeight(10.0), "halves").risk, Mean())

    def plain_step() -> None:
        total = torch.zeros(())
        for each, target in zip(inputs, targets, strict=True):
            factor = torch.ones((), requires_grad=True)
            losses = mse_loss(plain(each) * factor, target, reduction="none")
            halves = [torch.autograd.grad(losses[at::2].mean(), factor, create_graph=True)[0] for at in (0, 1)]
            total = total + (losses.mean() + 10 * halves[0] * halves[1]) / 10
        plain.zero_grad()
        (total / 2).backward()

    seconds, reference, ratio = interleaved(lambda: gradients(inputs, targets), plain_step, repeats=200, warmup=20)
    name = "IRMv1 gradient, 2 × 10000 examples, halves, linear model of 4"
    return Row(name, seconds, "the paper's lines", reference, ratio, "")
