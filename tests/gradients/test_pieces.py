"""A step whose batches are processed in pieces is the same step: the rule votes once for each environment."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from process_groups import in_processes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from concord.aggregation import RULES, AndMask, Mean, PCGrad
from concord.errors import InputError
from concord.gradients import EnvironmentStep, HookedGradients, PerExampleGradients, StackedGradients
from concord.objectives import PenaltyWeight, SpectralDecoupling
from concord.weighted import Weighted

NAMES = ("a", "b", "c")


def network(middle: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), middle or nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)).double()


def batches(examples: int, environments: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(examples)
    return tuple(torch.randn(environments, examples, width, generator=generator).double() for width in (6, 2))  # type: ignore[return-value]


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor], _: int) -> tuple[Tensor, Tensor]:
    """A sum over examples, and its weight: examples count differently, so pieces of one size do, too."""
    inputs, targets = batch
    weights = inputs[:, 0].square() + 0.1
    return ((model(inputs) - targets).square().mean(1) * weights).sum(), weights.sum()


def step_of(kind: Any, batch: Any, loss: Any = mse_loss, **options: Any) -> tuple[EnvironmentStep, list[Tensor]]:
    model = network()
    step = kind(model, loss, **options)(batch, 3)
    return step, [each.grad.clone() for each in model.parameters() if each.grad is not None]


def assert_same(one: tuple[EnvironmentStep, list[Tensor]], other: tuple[EnvironmentStep, list[Tensor]]) -> None:
    for name in ("losses", "weights", "kept_fraction"):
        torch.testing.assert_close(getattr(one[0], name), getattr(other[0], name))
    assert one[0].skipped == other[0].skipped
    torch.testing.assert_close(one[1], other[1])


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_the_update_of_the_whole_batch(name: str, vectorize: bool) -> None:
    options = {"rule": RULES[name](), "vectorize": vectorize}
    batch = batches(7, environments=4)
    assert_same(step_of(StackedGradients, batch, accumulate=3, **options), step_of(StackedGradients, batch, **options))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([mse_loss, weighted]),
    st.sampled_from([0.0, 0.5]),
)
def test_pieces_of_any_size_and_weight_add_up(
    examples: int, pieces: int, vectorize: bool, loss: Any, momentum: float
) -> None:
    batch = batches(examples)
    options = {"rule": AndMask(0.8), "vectorize": vectorize, "environment_momentum": momentum, "names": NAMES}
    whole = step_of(StackedGradients, batch, loss, **options)
    assert_same(step_of(StackedGradients, batch, loss, accumulate=pieces, **options), whole)


@pytest.mark.parametrize("vectorize", [True, False])
def test_pieces_of_weighted_examples_add_up_with_penalized_outputs(vectorize: bool) -> None:
    batch = Weighted(*batches(6), torch.rand(3, 6, generator=torch.Generator().manual_seed(0)).double())
    risk = SpectralDecoupling(mse_loss, PenaltyWeight(0.7)).risk
    options = {"rule": AndMask(0.5), "vectorize": vectorize}
    whole = step_of(StackedGradients, batch, risk, **options)
    assert_same(step_of(StackedGradients, batch, risk, accumulate=2, **options), whole)


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_piece_may_have_only_examples_that_do_not_count(vectorize: bool) -> None:
    weights = torch.ones(3, 6).double()
    weights[0, :4] = 0
    weights[1, 2:] = 0  # as StackEnvironments fills an environment up
    batch = Weighted(*batches(6), weights)
    options = {"rule": AndMask(0.5), "vectorize": vectorize}
    whole = step_of(StackedGradients, batch, **options)
    assert_same(step_of(StackedGradients, batch, accumulate=3, **options), whole)
    batch.weights[2] = 0
    with pytest.raises(InputError, match="risk: its weight is 0"):
        step_of(StackedGradients, batch, accumulate=3, **options)


CLASSES = torch.tensor([1.0, 5.0, 0.2]).double()
LOSSES_OF_CLASSES: dict[str, Any] = {
    "cross-entropy": cross_entropy,
    "weights": nn.CrossEntropyLoss(CLASSES, label_smoothing=0.1),
    "partial": partial(cross_entropy, weight=CLASSES, ignore_index=2),
    "likelihood": nn.NLLLoss(CLASSES),
}
# PerExampleGradients refuses pieces of a risk that gives a sum and its weight.
PENALIZED_OUTPUTS = SpectralDecoupling(nn.CrossEntropyLoss(CLASSES), PenaltyWeight(0.7)).risk


def of_classes(seed: int, shape: tuple[int, ...], ignored: int) -> tuple[Tensor, Tensor]:
    """Inputs, of which a linear layer makes outputs ``(..., 3)``, and classes; some targets do not count."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, shape, generator=generator)
    targets[..., 1:][torch.rand(shape, generator=generator)[..., 1:] < 0.3] = ignored
    return torch.randn(*shape, 4, generator=generator).double(), targets


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *itertools.product([StackedGradients, PerExampleGradients, "one by one"], LOSSES_OF_CLASSES),
        (StackedGradients, "penalized outputs"),
        ("one by one", "penalized outputs"),
    ],
)
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 7), st.integers(2, 9))
def test_pieces_add_up_where_targets_count_differently(
    kind: Any, name: str, seed: int, examples: int, pieces: int
) -> None:
    loss = LOSSES_OF_CLASSES.get(name, PENALIZED_OUTPUTS)
    inputs, targets = of_classes(seed, (3, examples), ignored=2 if name == "partial" else -100)
    targets[:, 0] = 1
    found = []
    for count in (1, pieces):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3).double()
        more: dict[str, Any] = {"accumulate": count} | ({"vectorize": False} if kind == "one by one" else {})
        source = PerExampleGradients if kind is PerExampleGradients else StackedGradients
        step = source(model, loss, AndMask(0.3), **more)((inputs, targets), 3)
        found.append((step.losses, step.kept_fraction, [each.grad for each in model.parameters()]))
    if kind is PerExampleGradients:  # a loss of the pass
        found = [each[1:] for each in found]
    torch.testing.assert_close(found[1], found[0])


def test_the_loss_of_one_example_has_no_class_weight() -> None:
    with pytest.raises(InputError, match=r"definition=loss: .* no class weight; give contribution"):
        PerExampleGradients(network(), nn.CrossEntropyLoss(CLASSES), Mean(), definition="loss")


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 6), st.integers(1, 20), st.sampled_from([Mean(), AndMask(0.4)]))
def test_each_example_votes_once_in_whatever_piece_it_is(examples: int, pieces: int, rule: Any) -> None:
    batch = batches(examples)
    whole = step_of(PerExampleGradients, batch, rule=rule)
    assert_same(step_of(PerExampleGradients, batch, rule=rule, accumulate=pieces), whole)


@pytest.mark.parametrize("kind", [StackedGradients, PerExampleGradients])
def test_what_is_not_finite_is_left_out_of_all_pieces(kind: Any) -> None:
    inputs, targets = batches(5)
    inputs[1, 3] = torch.inf
    options = {"rule": AndMask(0.5), "nonfinite": "skip"}
    whole = step_of(kind, (inputs, targets), **options)
    in_pieces = step_of(kind, (inputs, targets), accumulate=2, **options)
    assert len(whole[0].skipped) == 1
    assert in_pieces[0].skipped == whole[0].skipped
    torch.testing.assert_close(in_pieces[1], whole[1])


def test_a_mask_over_pieces_would_be_another_rule() -> None:
    inputs, targets = batches(6)
    votes = (inputs.unflatten(1, (2, 3)).flatten(0, 1), targets.unflatten(1, (2, 3)).flatten(0, 1))
    in_pieces = step_of(StackedGradients, (inputs, targets), rule=AndMask(1.0), accumulate=2)
    assert (
        step_of(StackedGradients, votes, rule=AndMask(1.0))[0].kept_fraction.mean() < in_pieces[0].kept_fraction.mean()
    )


@pytest.mark.parametrize("kind", [StackedGradients, PerExampleGradients])
def test_batch_norm_is_refused_by_the_name_of_its_module(kind: Any) -> None:
    model = network(nn.BatchNorm1d(5))
    source = kind(model, mse_loss, AndMask(0.5), accumulate=2)
    with pytest.raises(InputError, match=r"accumulate=2: module 1 \(BatchNorm1d\) normalizes over the batch"):
        source(batches(4))
    model.eval()  # statistics of the past treat examples separately
    source(batches(4))


def test_what_cannot_be_added_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"accumulate=0: must be at least 1"):
        StackedGradients(network(), mse_loss, PCGrad(), accumulate=0)
    with pytest.raises(InputError, match=r"pooled.*to which pieces are added"):
        StackedGradients(network(), mse_loss, Mean(), vectorize="pooled", accumulate=2)
    with pytest.raises(InputError, match=r"accumulate=2: needs the definition contribution"):
        PerExampleGradients(network(), mse_loss, Mean(), definition="loss", accumulate=2)
    with pytest.raises(InputError, match="accumulate=2: the risk gives a sum and its weight"):
        PerExampleGradients(network(), weighted, Mean(), accumulate=2)(batches(4))


def test_no_pass_sees_more_than_a_piece() -> None:
    seen: list[int] = []
    for kind in (StackedGradients, PerExampleGradients):
        model = network()
        model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-2]))
        kind(model, mse_loss, AndMask(0.5), accumulate=4)(batches(8))
    assert max(seen) == 6  # a quarter of 24 examples, or of 8 in each environment


@in_processes(3, placement=["hook", "hook of classes", "hook of sums", "two-level", "examples", "examples of classes"])
def test_pieces_in_several_processes_add_up(placement: str) -> None:
    inputs, targets = batches(7)
    usual: Any = mse_loss
    if placement.endswith("of classes"):
        usual, targets = nn.CrossEntropyLoss(CLASSES[:2]), torch.arange(21).view(3, 7) % 3 % 2
        targets[1, :3] = -100  # a piece of none
    own = slice(dist.get_rank(), dist.get_rank() + 1)
    results = []
    for options in ({}, {"accumulate": 3}):
        model = network()
        source: Any
        if placement.startswith("examples"):
            source = PerExampleGradients(model, usual, AndMask(0.5), group=dist.group.WORLD, **options)
        elif placement == "two-level":
            source = StackedGradients(model, mse_loss, AndMask(0.8), names=["own"], group=dist.group.WORLD, **options)
        else:
            loss: Any = weighted if placement == "hook of sums" else usual
            source = HookedGradients(model, loss, AndMask(0.8), environment_momentum=0.5, **options)
        for step in range(3):
            result = source((inputs[own] + step, targets[own]), step)
        if placement.endswith("of classes"):  # weights of targets, not their number
            result = result._replace(weights=torch.zeros(()), losses=torch.zeros(()))
        results.append((result, [each.grad.clone() for each in model.parameters() if each.grad is not None]))
    assert_same(results[1], results[0])


@in_processes(2)
def test_examples_of_classes_count_alike_wherever_they_are() -> None:
    inputs, targets = of_classes(0, (2, 6), ignored=-100)
    targets[1] = 1  # of the weight 5, all in one process
    own = slice(dist.get_rank(), dist.get_rank() + 1)
    found = []
    for group, places in ((None, slice(None)), (dist.group.WORLD, own)):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        source = PerExampleGradients(model, LOSSES_OF_CLASSES["weights"], AndMask(0.3), group=group)
        source((inputs[places], targets[places]))
        found.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(found[1], found[0])
