"""More votes: averages of each environment's gradients over its steps, and several batches of each before an update.

Both against a loop in float64 that follows the formulas; over several processes in ``test_collective.py``, in runs in
``test_training.py``.
"""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_rules import Averages
from test_placements import RULES, assert_is, batches, network, source
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from concord.aggregation import AndMask, Mean
from concord.environments import BatchStream, Environment
from concord.errors import InputError
from concord.gradients import (
    Aggregation,
    AggregationHook,
    NonFiniteGradientError,
    PerExampleGradients,
    StackedGradients,
    per_example,
)

WAYS = ["vectorized", "in chunks", "one by one"]


def moved(model: nn.Module) -> None:
    """The weights after a step, so that the next gradients are those of another place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.05 * parameter.grad)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=4, deadline=None)
@given(
    beta=st.floats(0, 0.999), environments=st.sampled_from([2, 7, 40]), way=st.sampled_from(WAYS), seed=st.integers(0)
)
def test_a_rule_sees_the_averages_of_a_loop(name: str, beta: float, environments: int, way: str, seed: int) -> None:
    model, averages = network(), Averages(beta)
    gradients = source(model, RULES[name], way, environment_momentum=beta)
    for step in range(3):
        inputs, targets = batches(environments, batch=2, seed=(seed + step) % 2**60)
        kept = gradients((inputs, targets), step).kept_fraction
        assert_is(model, kept, RULES[name], list(zip(inputs, targets, strict=True)), step, averages)
        moved(model)


@pytest.mark.parametrize("name", ["and-mask", "grad-drop"])
@settings(max_examples=4, deadline=None)
@given(k=st.integers(1, 5), environments=st.sampled_from([2, 7, 40]), way=st.sampled_from([*WAYS, "pooled"]))
def test_batches_before_an_update_vote_as_in_a_loop_over_them(name: str, k: int, environments: int, way: str) -> None:
    inputs, targets = batches(environments, batch=11)
    parts = [Environment(str(at), *each) for at, each in enumerate(zip(inputs, targets, strict=True))]
    stream, one = BatchStream(parts, 3, seed=4, batches_each=k), BatchStream(parts, 3, seed=4)
    model = network()
    gradients = source(model, RULES[name], way)
    for step in range(2):
        kept = gradients(stream.batch(step), step).kept_fraction
        singles = [one.batch(step * k + number) for number in range(k)]
        pairs = [(x, y) for batch in singles for x, y in zip(*batch, strict=True)]
        assert_is(model, kept, RULES[name], pairs, step)
        moved(model)


def test_a_batch_is_named_by_its_environment_and_its_number() -> None:
    parts = [Environment(name, torch.zeros(9, 6), torch.zeros(9, 2)) for name in ("north", "south")]
    stream = BatchStream(parts, 3, seed=0, batches_each=2)
    names = ["north, batch 1", "north, batch 2", "south, batch 1", "south, batch 2"]
    assert stream.names(5) == names
    inputs, targets = stream.batch(0)
    inputs[2] = torch.inf
    with pytest.raises(NonFiniteGradientError, match="environment south, batch 1 is not finite at step 0"):
        StackedGradients(network(torch.float32), mse_loss, Mean(), names=names)((inputs, targets))
    with pytest.raises(InputError, match="batches_each=0: must be at least 1"):
        BatchStream(parts, 3, seed=0, batches_each=0)


# What is not finite


def spoiled(seed: int, environment: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batches(seed=seed)
    inputs[environment] = torch.nan
    return inputs, targets


@pytest.mark.parametrize("way", WAYS)
def test_an_environment_that_is_skipped_keeps_its_average(way: str) -> None:
    model, averages = network(), Averages(0.8)
    gradients = source(model, RULES["and-mask"], way, environment_momentum=0.8, nonfinite="skip")
    for step, bad in enumerate([None, 2, 5, None]):
        inputs, targets = batches(seed=step) if bad is None else spoiled(step, bad)
        result = gradients((inputs, targets))
        assert result.skipped == (() if bad is None else (f"environment {bad}",))
        assert_is(model, result.kept_fraction, RULES["and-mask"], list(zip(inputs, targets, strict=True)), 0, averages)
        moved(model)


def test_an_error_leaves_the_average_of_that_environment_as_it_was() -> None:
    model, averages = network(), Averages(0.8)
    gradients = source(model, Mean(), "vectorized", environment_momentum=0.8)
    for step, bad in enumerate([None, 2, None]):
        inputs, targets = batches(seed=step) if bad is None else spoiled(step, bad)
        if bad is not None:
            with pytest.raises(NonFiniteGradientError, match="environment 2 is not finite at step 1"):
                gradients((inputs, targets))
            averages(rows(model, inputs, targets))
            continue
        kept = gradients((inputs, targets)).kept_fraction
        assert_is(model, kept, Mean(), list(zip(inputs, targets, strict=True)), 0, averages)


@pytest.mark.parametrize("way", WAYS)
def test_what_overflows_propagates_to_the_scaler_and_not_into_the_average(way: str) -> None:
    model, averages = network(), Averages(0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    gradients = source(model, RULES["and-mask"], way, environment_momentum=0.8, scaler=scaler)
    for step, bad in enumerate([None, 3, None]):
        inputs, targets = batches(seed=step) if bad is None else spoiled(step, bad)
        kept = gradients((inputs, targets)).kept_fraction
        if bad is not None:
            assert not any(bool(parameter.grad.isfinite().any()) for parameter in model.parameters())
            averages(rows(model, inputs, targets))
            continue
        for parameter in model.parameters():
            parameter.grad /= 16
        assert_is(model, kept, RULES["and-mask"], list(zip(inputs, targets, strict=True)), 0, averages)


def rows(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Every environment's gradient, ``(environments, components)``."""
    found = [
        torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
        for x, y in zip(inputs, targets, strict=True)
    ]
    return torch.stack([torch.cat([gradient.reshape(-1) for gradient in each]) for each in found])


def test_each_parameter_counts_its_own_finite_gradients() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))

    def risk(model: Any, batch: Tensor, step: int) -> Tensor:
        return (model.one * batch[:, :3]).sum() + (model.other * batch[:, 3]).sum()

    gradients = StackedGradients(Two(), risk, Mean(), names=["a", "b"], nonfinite="skip", environment_momentum=0.5)
    batch = torch.ones(2, 1, 4)
    gradients(batch)
    batch[1, 0, 3] = torch.inf
    gradients(3 * batch)
    state = gradients.state_dict()
    assert state["steps/a"].tolist() == [2, 2]
    assert state["steps/b"].tolist() == [2, 1]
    mean = (0.25 * 1 + 0.5 * 3) / 0.75
    torch.testing.assert_close(state["average/b"], torch.tensor([mean, mean, mean, 1.0]))


# It stays what it is


def test_the_first_step_is_bit_for_bit_that_of_the_gradients() -> None:
    inputs, targets = (each.float() for each in batches())
    for vectorize in (None, True, False):
        plain, averaged = network(torch.float32), network(torch.float32)
        first = StackedGradients(averaged, mse_loss, AndMask(0.5), vectorize=vectorize, environment_momentum=0.9)
        first((inputs, targets))
        assert first.vectorize in (True, False)
        StackedGradients(plain, mse_loss, AndMask(0.5), vectorize=first.vectorize)((inputs, targets))
        for one, other in zip(plain.parameters(), averaged.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_an_own_loop_resumes_from_a_state_by_environment_names() -> None:
    names, model = ["a", "b", "c"], network()
    gradients = source(model, RULES["and-mask"], "vectorized", names=names, environment_momentum=0.9)
    for seed in range(3):
        gradients(batches(3, seed=seed))
    other = copy.deepcopy(model)
    turned = source(other, RULES["and-mask"], "vectorized", names=names[::-1], environment_momentum=0.9)
    turned.load_state_dict(gradients.state_dict())
    inputs, targets = batches(3, seed=9)
    gradients((inputs, targets))
    turned((inputs.flip(0), targets.flip(0)))
    for one, again in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, again.grad, rtol=1e-12, atol=1e-15)


def test_a_state_with_sorted_keys_is_matched_by_name() -> None:
    """Stores such as safetensors sort, and put environment 10 before environment 2."""
    model = network()
    gradients = source(model, RULES["and-mask"], "vectorized", environment_momentum=0.9)
    for seed in range(3):
        gradients(batches(12, seed=seed))
    other = copy.deepcopy(model)
    resumed = source(other, RULES["and-mask"], "vectorized", environment_momentum=0.9)
    resumed.load_state_dict(dict(sorted(gradients.state_dict().items())))
    gradients(batches(12, seed=9))
    resumed(batches(12, seed=9))
    for one, again in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, again.grad)
    assert list(resumed.state_dict()) == list(gradients.state_dict())


@pytest.mark.parametrize("names", [None, ["a", "b"]])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_of_before_the_first_step_begins_anew(names: list[str] | None, steps: int) -> None:
    model, fresh = network(), network()
    gradients = source(model, Mean(), "vectorized", names=names, environment_momentum=0.9)
    before = gradients.state_dict()
    for seed in range(steps):
        gradients(batches(2, seed=seed))
    gradients.load_state_dict(before)
    assert gradients.state_dict() == before == {}
    gradients(batches(2, seed=9))
    source(fresh, Mean(), "vectorized", names=names)(batches(2, seed=9))
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


# Invalid arguments


@pytest.mark.parametrize("beta", [-0.1, 1.0, float("nan")])
def test_a_beta_out_of_range_is_refused(beta: float) -> None:
    with pytest.raises(InputError, match=r"environment_momentum=.*: must lie in \[0, 1\)"):
        Aggregation(Mean(), environment_momentum=beta)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m, **o: StackedGradients(m, mse_loss, Mean(), vectorize="pooled", **o), "vectorize=pooled: forms no"),
        (lambda m, **o: per_example(m, Mean(), **o), "environment_momentum=0.9: each step has other examples"),
        (
            lambda m, **o: PerExampleGradients(m, mse_loss, Mean(), **o),
            "environment_momentum=0.9: each step has other examples",
        ),
        (lambda m, **o: AggregationHook(Mean(), **o), "environment_momentum=0.9: is kept by parameter; register"),
    ],
)
def test_momentum_is_refused_without_a_gradient_of_each_environment(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make(network(), environment_momentum=0.9)


def test_other_environments_than_before_are_refused_by_name() -> None:
    gradients = source(network(), Mean(), "vectorized", names=["a", "b"], environment_momentum=0.9)
    gradients(batches(2))
    before = gradients.state_dict()
    gradients.names = ["a", "c"]
    with pytest.raises(InputError, match="the environments of this step are a, c, and were a, b"):
        gradients(batches(2))
    with pytest.raises(InputError, match="there is no average of environment c"):
        gradients.load_state_dict(before)
    other = StackedGradients(nn.Linear(6, 2), mse_loss, Mean(), names=["a"], environment_momentum=0.9)
    with pytest.raises(InputError, match="average of environment a has 131 components of 8 parameters, expected 14 of"):
        other.load_state_dict(before)
