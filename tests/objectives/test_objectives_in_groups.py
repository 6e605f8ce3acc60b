"""Objectives over several processes: the same gradients and losses as in one."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective import assert_same_everywhere, batches, environment_names, local, network
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from process_groups import in_processes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from concord.aggregation import Mean
from concord.errors import InputError
from concord.gradients import HookedGradients, NonFiniteGradientError
from concord.objectives import (
    CORAL,
    DANN,
    EQRM,
    IGA,
    MMD,
    Fishr,
    GroupDRO,
    IRMv1,
    MetaIRM,
    MMREx,
    Objective,
    ObjectiveGradients,
    PenaltyWeight,
    SpectralDecoupling,
    VREx,
    WeightedERM,
)
from concord.objectives import OBJECTIVES as NAMES
from concord.objectives import objective as objective_named
from concord.training import ProcessContext, load_job, train
from concord.training.context import Silent

OBJECTIVES: dict[str, Objective] = {
    "erm by rows": WeightedERM(mse_loss, [1.0, 2.0, 3.0, 5.0, 8.0]),
    "irm": IRMv1(mse_loss, PenaltyWeight(0.5)),
    "vrex": VREx(mse_loss, PenaltyWeight(0.5)),
    "mm-rex": MMREx(mse_loss, PenaltyWeight(0.5)),
    "group-dro": GroupDRO(mse_loss, 0.5),
    "eqrm": EQRM(mse_loss),
    "fishr": Fishr(mse_loss, PenaltyWeight(0.5)),
    "iga": IGA(mse_loss, PenaltyWeight(0.5)),
    "coral": CORAL(mse_loss, PenaltyWeight(0.5)),
    "mmd": MMD(mse_loss, PenaltyWeight(0.5)),
    "sd": SpectralDecoupling(mse_loss, PenaltyWeight(0.5)),
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
    kept = copy.deepcopy(ours.module.state_dict()) if ours.module is not None else {}
    whole = ObjectiveGradients(model, ours, environment_names([5])[0])(inputs, targets, 0)
    expected = [parameter.grad for parameter in trained]
    if ours.module is not None:
        ours.module.load_state_dict(kept)
    mine = local(counts, rank)
    source = ObjectiveGradients(model, ours, environment_names(counts)[rank], dist.group.WORLD)
    part = source(inputs[mine], targets[mine], 0)
    torch.testing.assert_close(part.losses, whole.losses[mine])
    for parameter, one in zip(trained, expected, strict=True):
        assert parameter.grad is not one
        torch.testing.assert_close(parameter.grad, one, rtol=1e-4, atol=1e-6)
        assert_same_everywhere(parameter.grad)


@in_processes(4, slow=True, objective=NAMES)
@in_processes(4, objective=["vrex", "coral", "mixup", "meta-irm"])  # of losses, features, pairs, batches of others
@in_processes(1, 2, objective=NAMES)
def test_two_steps_are_the_same_for_any_counts_weights_and_shapes(objective: Any) -> None:
    """Hypothesis draws the same in every process; nothing is shrunk, since processes would then part."""

    @settings(derandomize=True, database=None, max_examples=4, phases=[Phase.generate], deadline=None)
    @given(
        counts=st.lists(st.integers(1, 3), min_size=dist.get_world_size(), max_size=dist.get_world_size()),
        examples=st.integers(2, 6),
        width=st.integers(1, 5),
        weighted=st.booleans() if objective != "mixup" else st.just(False),
        seed=st.integers(0, 99),
    )
    def two_steps(counts: list[int], examples: int, width: int, weighted: bool, seed: int) -> None:
        counts[0] += sum(counts) == 1
        torch.manual_seed(seed)
        inputs = torch.randn(2, sum(counts), examples, width, dtype=torch.float64)
        classes = torch.randint(3, (2, sum(counts), examples))
        one = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        loss: Any = of_weighted if weighted else cross_entropy
        made = [objective_named(objective, loss, penalty_weight=0.5, variance_momentum=0.9) for _ in range(2)]
        made[0].begin(one, sum(counts), 2)
        if made[0].module is not None:
            made[0].module.double()
        made[1].module = copy.deepcopy(made[0].module)
        models = [one, copy.deepcopy(one)]
        rank, mine = dist.get_rank(), local(counts, dist.get_rank())
        alone = ObjectiveGradients(models[0], made[0], environment_names([sum(counts)])[0])
        together = ObjectiveGradients(models[1], made[1], environment_names(counts)[rank], dist.group.WORLD)
        for step in range(2):
            torch.manual_seed(seed)
            whole = alone(inputs[step], classes[step], step)
            torch.manual_seed(seed + rank)  # the first process draws for all
            part = together(inputs[step, mine], classes[step, mine], step)
            torch.testing.assert_close(part.losses, whole.losses[mine], rtol=1e-10, atol=1e-12)
            for theirs, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-11)

    two_steps()


def of_weighted(model: nn.Module, batch: Any, step: int) -> tuple[Tensor, Tensor]:
    weights = batch[0][:, 0].exp()
    return (cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum(), weights.sum()


@in_processes(2, part=["dann", "group-dro", "fishr", "mixup", "own"])
def test_training_an_objectives_parameters_is_placement_free(part: str) -> None:
    """The job's own evaluation also draws the same random numbers."""
    job = load_job(str(Path(__file__).parents[1] / "jobs" / "calibrated.py")).job
    job = job if part == "own" else dataclasses.replace(job, objective=None)
    objective = "erm" if part == "own" else part
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


@in_processes(2, unused=[False, True], objective=["irm", "sd"])
def test_hooked_processes_take_uncoupled_risks(unused: bool, objective: Any) -> None:
    """One environment a process; the risk scales or squares what the model gives."""
    inputs, targets = batches(2)
    batch = {"inputs": inputs, "targets": targets, "counts": inputs[:, :, 0] > -1}
    part = {name: leaf[dist.get_rank()][None] for name, leaf in batch.items()}
    ours = objective_named(objective, masked_risk, penalty_weight=0.5)
    models = [network() for _ in range(2)]
    ObjectiveGradients(models[0], ours, ["a", "b"])(batch, 0)
    HookedGradients(models[1], ours.risk, Mean(), find_unused_parameters=unused)(part, 0)
    for one, several in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(several.grad, one.grad, rtol=1e-4, atol=1e-6)


@in_processes(2, objective=["meta-irm", "mmd"])
def test_batches_that_go_to_other_processes_have_one_shape(objective: str) -> None:
    inputs, targets = batches(4, batch=12 - dist.get_rank())
    source = ObjectiveGradients(network(), OBJECTIVES[objective], ["a", "b"], dist.group.WORLD)
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
