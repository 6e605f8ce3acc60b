"""Mixed batches become one row an environment, in which every example counts once."""

from collections import UserDict
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from concord.aggregation import Mean
from concord.environments import EnvironmentSampler, StackEnvironments, stack_environments
from concord.errors import InputError
from concord.gradients import StackedGradients


@st.composite
def mixed(draw: st.DrawFn) -> list[str]:
    """The environments of a batch's examples: one environment has a single example."""
    names = [f"e{number}" for number in range(draw(st.sampled_from([2, 7, 100])))]
    counts = draw(st.lists(st.integers(1, 6), min_size=len(names), max_size=len(names)))
    groups = [name for name, count in zip(names, [1, *counts[1:]], strict=True) for _ in range(count)]
    return draw(st.permutations(groups))


@given(mixed())
def test_every_example_of_a_mixed_batch_counts_once(groups: list[str]) -> None:
    ids = torch.arange(len(groups))
    (stacked, names), weights = stack_environments((ids, ids.view(-1, 1).expand(-1, 3)), groups)
    found = sorted(set(groups))
    assert stacked.shape == weights.shape == (len(found), max(map(groups.count, found)))
    assert names.shape == (*stacked.shape, 3)
    assert torch.equal(torch.bincount(stacked.flatten(), weights.flatten()), torch.ones(len(groups)).double())
    for row, name in zip(stacked.tolist(), found, strict=True):
        assert {groups[place] for place in row} == {name}  # a repeated example is of the same environment


@given(mixed(), st.integers(0, 99))
def test_the_risk_of_a_stacked_batch_is_the_mean_of_each_environment(groups: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(len(groups), 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (len(groups),), generator=generator)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)

    def risk(model: Any, batch: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        (inputs, targets), weights = batch
        losses = cross_entropy(model(inputs), targets, reduction="none")
        return (losses * weights).sum(), weights.sum()

    step = StackedGradients(model, risk, Mean(), vectorize=True)(stack_environments((inputs, targets), groups))
    each = [torch.tensor([name == group for group in groups]) for name in sorted(set(groups))]
    losses = torch.stack([cross_entropy(model(inputs[own]), targets[own]) for own in each])
    torch.testing.assert_close(step.losses, losses.detach())
    assert step.weights.tolist() == [int(own.sum()) for own in each]
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@given(mixed(), st.integers(1, 5), st.integers(0, 9))
def test_a_sampled_batch_has_as_many_examples_of_every_environment(groups: list[str], size: int, seed: int) -> None:
    sampler = EnvironmentSampler(groups, size, seed)
    largest = max(map(groups.count, groups))
    batches = list(sampler)
    assert len(batches) == len(sampler) == -(-largest // size)
    for batch in batches:
        assert {name: [groups[place] for place in batch].count(name) for name in groups} == dict.fromkeys(groups, size)
    seen = [place for batch in batches for place in batch]
    assert {*seen} == {*range(len(groups))}  # nothing is left out, and the smaller ones come again


def test_each_epoch_has_an_order_of_its_own_and_can_be_had_again() -> None:
    sampler = EnvironmentSampler(np.array([0] * 20 + [1] * 3), 4, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(1)
    assert list(sampler) == second
    assert list(EnvironmentSampler(torch.tensor([0] * 20 + [1] * 3), 4, seed=1)) == first


@pytest.mark.parametrize("kind", ["tuple", "mapping", "column"])
def test_a_data_loader_gives_stacked_batches(kind: str) -> None:
    hospitals = ["north", "south", "south", "west", "north", "south"]
    numbers = [hospitals.index(name) for name in hospitals]
    data: Any = {"x": torch.arange(6.0), "hospital": hospitals}
    dataset: Any = {
        "tuple": TensorDataset(data["x"], torch.tensor(numbers)),
        "mapping": [UserDict(x=x, hospital=name) for x, name in zip(data["x"], hospitals, strict=True)],
        "column": datasets.Dataset.from_dict(data),
    }[kind]
    loader = DataLoader(
        dataset,
        batch_sampler=EnvironmentSampler(dataset["hospital"] if kind == "column" else hospitals, 2),
        collate_fn=StackEnvironments(1 if kind == "tuple" else "hospital"),
    )
    for batch in loader:
        values, weights = batch if kind == "tuple" else (batch["x"], batch["weights"])
        assert [{hospitals[int(x)] for x in row} for row in values] == [{"north"}, {"south"}, {"west"}]
        assert torch.equal(weights, torch.ones(3, 2))


def test_what_cannot_be_stacked_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"environment=hospital: examples have no such part; there are x, site"):
        StackEnvironments("hospital")([{"x": 1.0, "site": "north"}])
    examples = [(torch.zeros(2), name) for name in ("north", "south", "north", "south")]
    assert StackEnvironments(1, weights=None)(examples)[0].shape == (2, 2, 2)
    with pytest.raises(InputError, match=r"different numbers of examples; draw them by EnvironmentSampler"):
        StackEnvironments(1, weights=None)(examples[:3])
    with pytest.raises(InputError, match=r"batch: holds (list|str)"):
        StackEnvironments("site")([{"x": "text", "site": "north"}])
    with pytest.raises(InputError, match=r"batch: holds \(3,\); expected tensors of 2 examples"):
        stack_environments(torch.zeros(3), ["north", "south"])
    with pytest.raises(InputError, match="example 1 has none"):
        stack_environments(torch.zeros(2), ["north", None])
    with pytest.raises(InputError, match="batch_size=0: must be at least 1"):
        EnvironmentSampler(["north", "south"], 0)
