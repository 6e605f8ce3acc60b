"""Objectives over several processes: the same gradients and losses as in one."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective import (
    assert_same_everywhere,
    batches,
    environment_names,
    local,
    network,
)
from process_groups import in_processes
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from concord.aggregation import (
    Mean,
)
from concord.errors import InputError
from concord.gradients import (
    HookedGradients,
    NonFiniteGradientError,
)
from concord.objectives import (
    DANN,
    IRMv1,
    MetaIRM,
    MMREx,
    Objective,
    ObjectiveGradients,
    PenaltyWeight,
    VREx,
)
from concord.objectives import objective as objective_named
from concord.training import ProcessContext, load_job, train
from concord.training.context import Silent

OBJECTIVES: dict[str, Objective] = {
    "irm": IRMv1(mse_loss, PenaltyWeight(0.5)),
    "vrex": VREx(mse_loss, PenaltyWeight(0.5)),
    "mm-rex": MMREx(mse_loss, PenaltyWeight(0.5)),
    "dann": DANN(mse_loss, PenaltyWeight(0.5)),
    "meta-irm": MetaIRM(mse_loss, 0.1, 2, PenaltyWeight(0.5)),
}


@in_processes(2, 3, objective=list(OBJECTIVES))
def test_objectives_do_not_depend_on_placement(objective: str) -> None:
    """Five environments over two or three processes, as in one; also what each process says of its own losses."""
    world, rank = dist.get_world_size(), dist.get_rank()
    counts = [4, 1] if world == 2 else [1, 2, 2]
    inputs, targets = batches(5)
    model, ours = network(), OBJECTIVES[objective]
    ours.begin(model, 5, 1)
    trained = [*model.parameters(), *(ours.module.parameters() if ours.module is not None else ())]
    whole = ObjectiveGradients(model, ours, environment_names([5])[0])(inputs, targets, 0)
    expected = [parameter.grad for parameter in trained]
    mine = local(counts, rank)
    source = ObjectiveGradients(model, ours, environment_names(counts)[rank], dist.group.WORLD)
    part = source(inputs[mine], targets[mine], 0)
    torch.testing.assert_close(part.losses, whole.losses[mine])
    for parameter, one in zip(trained, expected, strict=True):
        assert parameter.grad is not one
        torch.testing.assert_close(parameter.grad, one, rtol=1e-4, atol=1e-6)
        assert_same_everywhere(parameter.grad)


@in_processes(2, part=["dann", "own"])
def test_training_an_objectives_parameters_is_placement_free(part: str) -> None:
    """The job's own evaluation, too: what it draws at random is the same."""
    job = load_job(str(Path(__file__).parents[1] / "jobs" / "calibrated.py")).job
    job = job if part == "own" else dataclasses.replace(job, objective=None)
    objective = "erm" if part == "own" else "dann"
    config = job.config.with_options(epochs=2, batch_size=8, lr=1e-2, objective=objective, clip=1.0)
    alone = train(job, config, ProcessContext(), Silent()).metrics
    together = train(job, config, ProcessContext(dist.get_rank(), dist.get_world_size()), Silent()).metrics
    assert together.keys() == alone.keys()
    for name in alone.keys() - {"steps_per_second"}:
        assert math.isclose(together[name], alone[name], rel_tol=1e-4, abs_tol=1e-6), name


def masked_risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
    """The error of the examples that count, as a sum and their number."""
    errors = (model(batch["inputs"]) - batch["targets"]).square().mean(1) * batch["counts"]
    return errors.sum(), batch["counts"].sum()


@in_processes(2, objective=["vrex", "meta-irm"])
def test_objectives_of_a_risk_do_not_depend_on_placement(objective: Any) -> None:
    """Dictionaries of several dtypes; meta-IRM sends them to the other process."""
    counts = [4, 1]
    inputs, targets = batches(5)
    batch = {"inputs": inputs, "targets": targets, "counts": inputs[:, :, 0] > -1}
    mine = local(counts, dist.get_rank())
    part = {name: leaf[mine] for name, leaf in batch.items()}
    ours = objective_named(objective, masked_risk, penalty_weight=0.5)
    models = [network() for _ in range(2)]
    whole = ObjectiveGradients(models[0], ours, environment_names([5])[0])(batch, 0)
    source = ObjectiveGradients(models[1], ours, environment_names(counts)[dist.get_rank()], dist.group.WORLD)
    step = source(part, 0)
    torch.testing.assert_close(step.losses, whole.losses[mine])
    assert step.environments == whole.environments == 5
    if objective == "vrex":
        assert step.weights.tolist() == part["counts"].sum(1).tolist()
    for one, several in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(several.grad, one.grad, rtol=1e-4, atol=1e-6)
        assert_same_everywhere(several.grad)


@in_processes(2, unused=[False, True])
def test_hooked_processes_take_irms_risk(unused: bool) -> None:
    """One environment a process; the risk scales what the wrapped model gives."""
    inputs, targets = batches(2)
    batch = {"inputs": inputs, "targets": targets, "counts": inputs[:, :, 0] > -1}
    part = {name: leaf[dist.get_rank()][None] for name, leaf in batch.items()}
    ours = IRMv1(masked_risk, PenaltyWeight(0.5))
    models = [network() for _ in range(2)]
    ObjectiveGradients(models[0], ours, ["a", "b"])(batch, 0)
    HookedGradients(models[1], ours.risk, Mean(), find_unused_parameters=unused)(part, 0)
    for one, several in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(several.grad, one.grad, rtol=1e-4, atol=1e-6)


@in_processes(2)
def test_batches_that_go_to_other_processes_have_one_shape() -> None:
    inputs, targets = batches(4, batch=12 - dist.get_rank())
    source = ObjectiveGradients(network(), OBJECTIVES["meta-irm"], ["a", "b"], dist.group.WORLD)
    with pytest.raises(InputError, match=r"\[12, 6, 12, 3\] in process 0, \[11, 6, 11, 3\]"):
        source(inputs[:2], targets[:2], 0)


@in_processes(2)
def test_objectives_name_the_environment_that_is_not_finite() -> None:
    inputs, targets = batches(3)
    inputs[2] = torch.nan
    mine = local([1, 2], dist.get_rank())
    names = environment_names([1, 2])
    source = ObjectiveGradients(network(), OBJECTIVES["vrex"], names[dist.get_rank()], dist.group.WORLD)
    with pytest.raises(NonFiniteGradientError) as caught:
        source(inputs[mine], targets[mine], 3)
    assert caught.value.environments == (names[1][1],)
