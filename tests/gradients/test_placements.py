"""A rule is the same wherever its sums are formed: every placement against a float64 loop over environments.

The placements over several processes are among ``test_collective.py``.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_rules import OWN_RULES, looped
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from concord.aggregation import AGGREGATORS, GRADIENT, Aggregator, Statistic, Statistics, Update, aggregator
from concord.aggregation import RULES as BUILT_IN
from concord.errors import InputError
from concord.gradients import PerExampleGradients, StackedGradients, per_example

ENVIRONMENTS, BATCH = 7, 3
RULES = {name: aggregator(name, 0.5) for name in AGGREGATORS} | OWN_RULES
PLACEMENTS = ["vectorized", "in chunks", "one by one", "pooled"]


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2)).to(
        dtype
    )


def batches(environments: int = ENVIRONMENTS, batch: int = BATCH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Environments that agree in part."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(environments, batch, 6, generator=generator, dtype=torch.float64)
    shared = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    return inputs, torch.tanh(inputs @ shared) + 0.3 * torch.randn(environments, batch, 2, generator=generator)


def source(model: nn.Module, rule: Aggregator, placement: str, **options: Any) -> StackedGradients:
    one = 8 * sum(parameter.numel() for parameter in model.parameters())
    ways: dict[str, dict[str, Any]] = {
        "vectorized": {"vectorize": True},
        "in chunks": {"vectorize": True, "memory_limit": 2 * one},
        "one by one": {"vectorize": False},
        "pooled": {"vectorize": "pooled"},
    }
    return StackedGradients(model, mse_loss, rule, **ways[placement], **options)


def assert_is(
    model: nn.Module, kept: Tensor, rule: Aggregator, pairs: Any, step: int = 0, seen: Any = lambda rows: rows
) -> None:
    expected = looped(model, mse_loss, rule, pairs, step, seen)
    for parameter, update, fraction, found in zip(
        model.parameters(), expected.updates, expected.kept, kept, strict=True
    ):
        torch.testing.assert_close(parameter.grad, update, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.double(), fraction, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_that_of_a_loop_over_stacked_environments(name: str, placement: str) -> None:
    model, (inputs, targets) = network(), batches()
    gradients = source(model, RULES[name], placement)
    for step in (0, 5):  # a rule that draws draws anew at each
        kept = gradients((inputs, targets), step).kept_fraction
        assert_is(model, kept, RULES[name], list(zip(inputs, targets, strict=True)), step)


@pytest.mark.parametrize("form", ["one call", "a plain loop"])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_that_of_a_loop_over_examples(name: str, form: str) -> None:
    model, (inputs, targets) = network(), batches(2, 5)
    singles = [(x[None], y[None]) for x, y in zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True)]
    if form == "one call":
        gradients = PerExampleGradients(model, mse_loss, RULES[name])
        for step in (0, 5):
            kept = gradients((inputs, targets), step).kept_fraction
            assert_is(model, kept, RULES[name], singles, step)
        return
    with per_example(model, RULES[name]) as examples:
        mse_loss(model(inputs.flatten(0, 1)), targets.flatten(0, 1)).backward()
        assert_is(model, examples.aggregate().kept_fraction, RULES[name], singles)


@dataclass(frozen=True)
class Made:
    """Statistics that Hypothesis makes, and an update that depends on all of them."""

    functions: tuple[tuple[float, float, float], ...]

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        def made(low: float, high: float, power: float) -> Any:
            return lambda g: g.sign() * g.abs().pow(power) * ((g > low) | (g < -high))

        own = [Statistic(f"own {at}", made(*each)) for at, each in enumerate(self.functions)]
        return (GRADIENT, *own)

    def finish(self, sums: Statistics, environments: int) -> Update:
        value = sums["gradient"] / environments
        kept = torch.sigmoid(sum(sums[f"own {at}"] for at in range(len(self.functions))))  # type: ignore[arg-type]
        return Update(value * kept, kept)


_number = st.floats(0, 0.1)


@settings(max_examples=15, deadline=None)
@given(
    functions=st.lists(st.tuples(_number, _number, st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=3),
    environments=st.sampled_from([2, 7, 100]),
    placement=st.sampled_from(PLACEMENTS),
)
def test_statistics_that_nobody_has_seen_are_summed_as_a_loop_does(
    functions: list[tuple[float, float, float]], environments: int, placement: str
) -> None:
    rule = Made(tuple(functions))
    model, (inputs, targets) = network(), batches(environments)
    kept = source(model, rule, placement)((inputs, targets)).kept_fraction
    assert_is(model, kept, rule, list(zip(inputs, targets, strict=True)))
    singles = [(x[None], y[None]) for x, y in zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True)]
    kept = PerExampleGradients(model, mse_loss, rule)((inputs, targets)).kept_fraction
    assert_is(model, kept, rule, singles)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rule_without_gradients_names_the_non_finite_environment(placement: str) -> None:
    if placement == "pooled":
        placement = "vectorized"  # which stands in for such a rule
    inputs, targets = batches()
    inputs[2] = torch.nan
    model = network()
    with pytest.raises(FloatingPointError, match="environment 2"):
        source(model, OWN_RULES["majority-vote"], placement)((inputs, targets))
    step = source(model, OWN_RULES["majority-vote"], placement, nonfinite="skip")((inputs, targets))
    assert step.skipped == ("environment 2",)
    assert step.environments == ENVIRONMENTS - 1
    left = [index for index in range(ENVIRONMENTS) if index != 2]
    assert_is(model, step.kept_fraction, OWN_RULES["majority-vote"], [(inputs[i], targets[i]) for i in left])


# A statistic is what it says


class WithStatistics:
    def __init__(self, *statistics: Any) -> None:
        self.statistics = statistics

    def finish(self, sums: Statistics, environments: int) -> Update:
        value = next(iter(sums.values()))
        return Update(value, torch.ones_like(value))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (WithStatistics(), "needs statistics, a tuple of Statistic, and finish"),
        (WithStatistics(GRADIENT, Statistic("gradient", torch.abs)), "two of its statistics have the same name"),
        (WithStatistics(Statistic("norm", lambda g: g.norm())), r"norm maps a gradient of shape \(2, 3\) to \(\)"),
        (WithStatistics(Statistic("unit", lambda g: g / g.norm())), "unit gives a component another value beside"),
        (WithStatistics(Statistic("clip", lambda g: g.clamp_(-1, 1))), "clip writes into the gradient"),
        (WithStatistics(Statistic("half", lambda g: g.sign() / 2, whole=1)), "half claims whole numbers"),
        (
            WithStatistics(Statistic("dead", lambda g: g.sign() * (g.abs() > 0.5), "multiplicative")),
            "dead claims to be multiplicative, and is not",
        ),
        (WithStatistics(Statistic("root", lambda g: g.abs().sqrt(), "additive")), "root claims to be additive"),
        (WithStatistics(Statistic("cut", lambda g: g.clamp(-1, 1), degree=1)), "cut claims degree 1"),
    ],
    ids=lambda value: value.replace("\\", "") if isinstance(value, str) else "",
)
def test_statistics_that_are_not_what_they_say_are_refused(rule: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        StackedGradients(network(), mse_loss, rule)
    with pytest.raises(InputError, match=said):
        per_example(network(), rule)


def test_an_update_of_another_shape_is_refused() -> None:
    class Scalar(WithStatistics):
        def finish(self, sums: Statistics, environments: int) -> Update:
            return Update(sums["gradient"].sum(), sums["gradient"].sum())

    with pytest.raises(InputError, match=r"rule Scalar: gives an update of shape \(\)"):
        StackedGradients(network(), mse_loss, Scalar(GRADIENT))(batches())


# Where examples meet, one pass for all would be wrong


class Centred(nn.Module):
    """Subtracts the mean of the batch, so that the examples of a batch meet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs - outputs.mean(0)


class InPlace(nn.Module):
    """Writes into a layer's output, which is then another layer's input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 5).double(), nn.Linear(5, 2).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.two(self.one(inputs).mul_(2).relu_())
        return outputs


@pytest.mark.parametrize("kind", [Centred, InPlace])
def test_what_is_chosen_at_the_first_step_is_exact(kind: Any) -> None:
    model, (inputs, targets) = kind(), batches(20, 6)
    gradients = StackedGradients(model, mse_loss, OWN_RULES["half-signs"])
    for _ in range(2):
        kept = gradients((inputs, targets), 0).kept_fraction
        assert_is(model, kept, OWN_RULES["half-signs"], list(zip(inputs, targets, strict=True)))
    if kind is Centred:
        assert gradients.vectorize != "pooled"


class Wandering(InPlace):
    """Goes through a layer twice when it is told to."""

    twice = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(inputs)
        outputs: Tensor = self.two(hidden) + self.two(hidden.tanh()) if self.twice else self.two(hidden)
        return outputs


def test_a_model_that_goes_another_way_at_one_step_is_not_pooled_there() -> None:
    model, (inputs, targets) = Wandering(), batches()
    gradients = source(model, OWN_RULES["dead-zone"], "pooled")
    for model.twice in (False, True, False):
        kept = gradients((inputs, targets)).kept_fraction
        assert_is(model, kept, OWN_RULES["dead-zone"], list(zip(inputs, targets, strict=True)))
    assert gradients.vectorize == "pooled"


@pytest.mark.parametrize("placement", ["vectorized", "one by one", "pooled"])
@pytest.mark.parametrize("name", [*RULES, *(name for name in BUILT_IN if name not in RULES)])
def test_a_step_does_not_depend_on_the_default_device(name: str, placement: str) -> None:
    rule = RULES[name] if name in RULES else BUILT_IN[name]()
    model, batch = network(), batches()
    expected = [source(model, rule, placement)(batch, step) for step in range(2)]
    updates = [parameter.grad for parameter in model.parameters()]
    again = network()
    with torch.device("meta"):  # as `torch.set_default_device("cuda")` does for a model on the CPU
        gradients = source(again, rule, placement)
        found = [gradients(batch, step) for step in range(2)]
    torch.testing.assert_close([parameter.grad for parameter in again.parameters()], updates, rtol=0, atol=0)
    torch.testing.assert_close(found[1].losses, expected[1].losses, rtol=0, atol=0)
