"""Weights of environments by their rows: the average is then over all rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from concord.environments import Environment, Environments
from concord.errors import InputError
from concord.objectives import ObjectiveGradients, WeightedERM
from concord.training import Job, ProcessContext, TrainConfig, train
from concord.training.context import Silent
from concord.weighted import Weighted

SIZES = {"a": 1, "b": 2, "c": 8}


def rows(name: str) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(SIZES[name], 4, generator=torch.Generator().manual_seed(SIZES[name]))
    return drawn[:, :3], drawn[:, 3:]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def pooled_gradient(model: nn.Module) -> list[Tensor]:
    inputs, targets = (torch.cat(each) for each in zip(*map(rows, SIZES), strict=True))
    return list(torch.autograd.grad(mse_loss(model(inputs), targets), list(model.parameters())))


def test_by_rows_the_gradient_is_that_of_all_rows_in_one_batch() -> None:
    model = network()
    repeated = [[leaf.repeat(8 // SIZES[name], 1) for leaf in rows(name)] for name in SIZES]
    inputs, targets = (torch.stack(each) for each in zip(*repeated, strict=True))
    source = ObjectiveGradients(model, WeightedERM(mse_loss, list(map(float, SIZES.values()))), list(SIZES))
    source(inputs, targets, 0)
    for parameter, expected in zip(model.parameters(), pooled_gradient(model), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("weights", ["equal", "rows"])
def test_a_step_of_training_by_rows_is_one_on_all_rows(weights: Any) -> None:
    ended: list[nn.Module] = []

    def keep(config: TrainConfig, model: nn.Module) -> dict[str, float]:
        ended.append(model)
        return {}

    job = Job(
        environments=lambda config: Environments(rows, train=list(SIZES)),
        model=lambda config: network(),
        loss=mse_loss,
        final_measures=keep,
        name="rows",
    )
    config = TrainConfig().with_options(environment_weights=weights, batch_size=8, held_out=0.0, epochs=1)
    config = config.with_options(optimizer="sgd", momentum=0.0, lr=0.5, schedule="constant", evaluations=1)
    train(job, config, ProcessContext(), Silent())
    before = network()
    steps = [
        parameter - 0.5 * gradient
        for parameter, gradient in zip(before.parameters(), pooled_gradient(before), strict=True)
    ]
    alike = [torch.allclose(found, step) for found, step in zip(ended[0].parameters(), steps, strict=True)]
    assert all(alike) == (weights == "rows")


def test_rows_with_weights_count_by_them() -> None:
    inputs, targets = rows("b")
    assert Environment("b", inputs, targets).total_weight == 2.0
    assert Environment("b", Weighted(inputs, targets, torch.tensor([0.5, 3.0]))).total_weight == 3.5


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"objective": "vrex"}, "--environment-weights rows: --objective vrex weighs them; give equal"),
        ({"objective": "irm"}, "--environment-weights rows: --objective irm weighs them; give equal"),
        ({"per_example": True}, "--environment-weights rows: with --per-example all count alike"),
        (
            {"aggregator": "and-mask"},
            "--aggregator and-mask: --environment-weights rows couples the environments, so there is one gradient; "
            "give mean",
        ),
        ({"environment_momentum": 0.9}, "--environment-momentum 0.9: --environment-weights rows has one gradient of"),
        ({"accumulate": 2}, "--accumulate 2: --environment-weights rows is no mean over the examples of a batch"),
        ({"environments_per_step": 2}, "--environments-per-step 2: --environment-weights rows keeps all environments"),
    ],
    ids=str,
)
def test_weights_by_rows_are_refused_where_they_mean_nothing(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as error:
        TrainConfig().with_options(environment_weights="rows", **changes).check()
    assert str(error.value).startswith(line)
