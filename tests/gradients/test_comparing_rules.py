"""Rules that compare environments (weightings, column rules) are the same in every placement."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective import TINY, assert_same_everywhere, batches, ddp, local, network, poisoned, two_level
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from memory import PeakMemory
from own_rules import Averages
from process_groups import in_processes
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from concord.aggregation import (
    MGDA,
    CAGrad,
    Clipping,
    ColumnRule,
    Krum,
    Median,
    PCGrad,
    TemporalAgreementAdam,
    TrimmedMean,
    UPGrad,
    Weighting,
    weights_of,
)
from concord.aggregation.families import Rule
from concord.errors import ArgumentError, InputError
from concord.gradients import (
    HookedGradients,
    NonFiniteGradientError,
    PerExampleGradients,
    StackedGradients,
    group_gradients,
    per_example,
    register_aggregation_hook,
)
from concord.gradients.group_gradients import Product

RULES: dict[str, Any] = {
    "pcgrad": PCGrad(seed=3),
    "mgda": MGDA(),
    "cagrad": CAGrad(0.5),
    "upgrad": UPGrad(),
    "krum": Krum(byzantine=0, selected=2),
    "clip": Clipping(0.3),
    "median": Median(),
    "trimmed-mean": TrimmedMean(0.2),
}
NAMES = [*RULES, "torchjd"]
PLACEMENTS = ["vectorized", "one by one", "pooled", "layer by layer", "chosen", "chosen layer by layer"]


def rule_named(name: str) -> Any:
    if name == "torchjd":
        from torchjd.aggregation import KrumWeighting  # takes a second in each process

        return KrumWeighting(0, 2)
    return RULES[name]


def source(model: nn.Module, rule: Rule, placement: str, **options: Any) -> StackedGradients:
    two = 2 * 8 * sum(parameter.numel() for parameter in model.parameters())
    ways: dict[str, dict[str, Any]] = {
        "vectorized": {"vectorize": True},
        "one by one": {"vectorize": False},
        "pooled": {"vectorize": "pooled"},
        "layer by layer": {"vectorize": "pooled", "memory_limit": two},
        "chosen": {},
        "chosen layer by layer": {"memory_limit": two},
    }
    return StackedGradients(model, mse_loss, rule, **ways[placement], **options)


def gradients_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """(environments, components), one backward pass each in float64."""
    model = copy.deepcopy(model).double()
    rows = []
    for x, y in zip(inputs.double(), targets.double(), strict=True):
        parts = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
        rows.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(rows)


def expected_update(rule: Any, rows: Tensor, step: int = 0) -> tuple[Tensor, Tensor | None]:
    if isinstance(rule, ColumnRule):
        return rule.combine(rows), None
    gram = rows @ rows.T
    weights = weights_of(rule, gram, step) if isinstance(rule, Weighting) else rule(gram)
    return weights @ rows, weights


def left(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])  # type: ignore[union-attr]


def assert_is(model: nn.Module, result: Any, rule: Any, rows: Tensor, step: int = 0, tolerance: float = 1e-9) -> None:
    update, weights = expected_update(rule, rows, step)
    assert (left(model).double() - update).norm() <= tolerance * rows.norm(dim=1).max()
    assert result.environments == len(rows)
    assert result.kept_fraction.numel() == 0
    assert (result.environment_weights is None) == (weights is None)


Task = tuple[str, nn.Module, Tensor, Tensor]


@st.composite
def tasks(draw: st.DrawFn, names: Sequence[str], least: int = 1, most: int = 32) -> Task:
    """A rule, a network of any widths, inputs and targets of environments; their gradients have any rank and scale."""
    name = draw(st.sampled_from(names))
    environments = draw(st.integers(max(least, 3) if name in ("krum", "torchjd") else least, most))
    seed, examples = draw(st.integers(0, 1000)), draw(st.integers(1, 5))
    widths = [6, *draw(st.lists(st.integers(1, 20), max_size=2)), 3]
    torch.manual_seed(seed)
    layers = [part for shape in itertools.pairwise(widths) for part in (nn.Linear(*shape), nn.Tanh())]
    model = nn.Sequential(*layers[:-1]).double()
    inputs, targets = (each.double() for each in batches(environments, seed, examples))
    forms = ["different", "equal", "opposite", "zero", "of low rank"]
    # On a line TorchJD's sums of distances are often equal, and rounding chooses.
    form = draw(st.sampled_from(forms[:-1] if name == "torchjd" else forms))
    if form == "of low rank":  # environments with the same inputs: the gradients follow the residuals
        inputs, basis = inputs[:1].expand_as(inputs), targets[: draw(st.integers(1, 3))]
        targets = model(inputs).detach() + torch.einsum(
            "er,rxo->exo", torch.randn(environments, len(basis)).double(), basis
        )
    elif form != "different" and environments > 1:
        outputs = model(inputs[0]).detach()
        inputs[1] = inputs[0]
        targets[1] = outputs + {"equal": 1, "opposite": -1, "zero": 0}[form] * (targets[0] - outputs)
    scale = draw(st.sampled_from([1e-3, 1.0, 1e2]))
    outputs = torch.stack([model(each).detach() for each in inputs])
    return name, model, inputs, outputs + scale * (targets - outputs)


def tolerance_of(name: str) -> float:
    """The accuracy of a rule's update, as a part of the largest gradient."""
    return 1e-5 if name in ("mgda", "cagrad") else 1e-9


@settings(max_examples=40, deadline=None)
@given(tasks(sorted(NAMES)))
def test_every_rule_is_that_of_a_loop_in_every_stacked_placement(task: Task) -> None:
    name, model, inputs, targets = task
    rule, rows = rule_named(name), gradients_of(model, inputs, targets)
    for placement in PLACEMENTS:
        gradients = source(model, rule, placement)
        for step in (0, 5) if name == "pcgrad" else (5,):  # it draws anew at each
            result = gradients((inputs, targets), step)
            assert_is(model, result, rule, rows, step, tolerance_of(name))


class Convolutional(nn.Module):
    """Layers whose gradients come in every form, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(5, 4), nn.Conv1d(3, 6, 2), nn.GroupNorm(2, 6), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)
        )
        self.shared = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.shared(self.shared(self.layers(tokens)).tanh())
        return hidden


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["upgrad", "median"])
def test_gradients_of_every_form_of_layer_are_compared(name: str, placement: str) -> None:
    model = Convolutional().double()
    tokens, targets = torch.randint(0, 5, (6, 3, 3)), torch.randn(6, 3, 2, dtype=torch.float64)
    result = source(model, RULES[name], placement)((tokens, targets), 0)
    rows = []
    parameters = list(model.parameters())
    for x, y in zip(tokens, targets, strict=True):
        parts = torch.autograd.grad(mse_loss(model(x), y), parameters, materialize_grads=True)
        rows.append(torch.cat([part.reshape(-1) for part in parts]))
    assert_is(model, result, RULES[name], torch.stack(rows))


class Tempered(nn.Module):
    """A parameter that is one number, without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.temperature = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * self.temperature


@pytest.mark.parametrize("placement", ["vectorized", "one by one", "pooled", "chosen"])
@pytest.mark.parametrize("name", RULES)
def test_a_parameter_may_be_one_number(name: str, placement: str) -> None:
    model, (inputs, targets) = Tempered().double(), (each.double() for each in batches(5))
    result = source(model, RULES[name], placement)((inputs, targets), 0)
    assert_is(model, result, RULES[name], gradients_of(model, inputs, targets))


class Given:
    """A weighting that gives what it is told to."""

    def __init__(self, weights: Callable[[Tensor], Any]) -> None:
        self.weights = weights


def test_dropout_draws_once_for_weights_and_update() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(), nn.Linear(16, 3)).double()
    inputs, targets = (each.double() for each in batches(4))

    def update(rule: Rule) -> Tensor:
        torch.manual_seed(1)
        source(model, rule, "vectorized")((inputs, targets), 0)
        return left(model)

    assert torch.equal(update(UPGrad()), update(UPGrad()))
    rows = torch.stack([update(Given(lambda _, alone=alone: alone)) for alone in torch.eye(4).double()])
    torch.testing.assert_close(update(UPGrad()), expected_update(UPGrad(), rows)[0])


def test_each_environments_average_over_steps_is_compared() -> None:
    model, averages = network().double(), Averages(0.8)
    gradients = StackedGradients(model, mse_loss, RULES["pcgrad"], environment_momentum=0.8)
    for step in range(3):
        inputs, targets = (each.double() for each in batches(5, step))
        result = gradients((inputs, targets), step)
        assert_is(model, result, RULES["pcgrad"], averages(gradients_of(model, inputs, targets)), step)


# Over processes


@in_processes(3, slow=True, rule=NAMES, placement=["hook", "small buckets", "two-level", "one each"])
@in_processes(3, rule=["pcgrad", "median"], placement=["hook", "small buckets", "one each"])  # draws, columns
@in_processes(3, rule=NAMES, placement=["two-level"])
def test_every_rule_is_that_of_a_loop_over_processes(rule: str, placement: str) -> None:
    made = rule_named(rule)

    def placed_source(model: nn.Module, counts: Sequence[int]) -> Any:
        if placement in ("hook", "small buckets"):
            return HookedGradients(model, mse_loss, made, find_unused_parameters=placement == "small buckets")
        return two_level(model, made, counts)

    # Every process draws the same tasks. Without shrinking, since one process alone would do that.
    @settings(max_examples=5, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(tasks([rule], 4, 32) if placement == "two-level" else tasks([rule], 3, 3))
    def check(task: Task) -> None:
        _, model, inputs, targets = task
        counts = [(len(inputs) - 1) // 2, 1, len(inputs) // 2]
        rows, gradients, own = (
            gradients_of(model, inputs, targets),
            placed_source(model, counts),
            local(counts, dist.get_rank()),
        )
        assert_same_everywhere(rows)
        for step in range(3):  # DDP lays its buckets out anew after the first
            result = gradients((inputs[own], targets[own]), step)
            assert_is(model, result, made, rows, step, tolerance_of(rule))
            assert_same_everywhere(left(model))
            if result.environment_weights is not None:
                assert_same_everywhere(result.environment_weights)

    check()


@in_processes(2)
def test_a_ddp_model_with_the_hook_has_the_weights_of_all_processes() -> None:
    model = ddp(network(), bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, PCGrad())
    inputs, targets = batches(2)
    for _ in range(2):
        model.zero_grad()
        mse_loss(model(inputs[dist.get_rank()]), targets[dist.get_rank()]).backward()
        rows = gradients_of(model.module, inputs, targets)
        update, weights = expected_update(PCGrad(), rows, hook.step - 1)
        torch.testing.assert_close(left(model.module).double(), update, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(hook.weights, weights, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="rule PCGrad: drops no components; there is no kept fraction"):
        hook.kept_fraction(model.module[0].weight)


def placed(model: nn.Module, rule: Any, form: str, counts: Sequence[int], **options: Any) -> Any:
    if form == "hook":
        return HookedGradients(model, mse_loss, rule, environment=f"site {dist.get_rank()}.0", **options)
    return two_level(model, rule, counts, **options)


@in_processes(2, form=["hook", "two-level"], rule=["krum", "median"], nonfinite=["raise", "skip", "propagate"])
def test_an_environment_that_is_not_finite_is_treated_as_asked(form: str, rule: str, nonfinite: Any) -> None:
    rank, counts = dist.get_rank(), [3, 2] if form == "two-level" else [1, 1]
    made = Clipping(0.3) if rule == "krum" else RULES[rule]
    inputs, targets = batches(sum(counts))
    model, own = network(), local(counts, rank)
    gradients = placed(model, made, form, counts, nonfinite=nonfinite)
    broken = poisoned(inputs, 1)
    name = "site 1.0" if form == "hook" else "site 0.1"
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match=name):
            gradients((broken[own], targets[own]), 0)
        return
    result = gradients((broken[own], targets[own]), 0)
    if nonfinite == "propagate":
        assert not torch.isfinite(left(model)).all()
        return
    others = [index for index in range(sum(counts)) if index != 1]
    update, _ = expected_update(made, gradients_of(model, inputs[others], targets[others]))
    torch.testing.assert_close(left(model).double(), update, rtol=1e-4, atol=1e-6)
    assert result.skipped == (name,)
    if result.environment_weights is not None:
        assert (result.environment_weights == 0).nonzero().tolist() == [[1]]


@pytest.mark.parametrize("placement", ["vectorized", "pooled", "layer by layer"])
def test_a_stacked_environment_that_is_not_finite_is_left_out(placement: str) -> None:
    model, (inputs, targets) = network(), batches(5)
    names = [f"site {index}" for index in range(5)]
    result = source(model, Clipping(0.3), placement, nonfinite="skip", names=names)((poisoned(inputs, 3), targets), 0)
    others = [0, 1, 2, 4]
    update, _ = expected_update(Clipping(0.3), gradients_of(model, inputs[others], targets[others]))
    torch.testing.assert_close(left(model).double(), update, rtol=1e-4, atol=1e-6)
    assert (result.skipped, result.environments, float(result.environment_weights[3])) == (("site 3",), 4, 0)
    with pytest.raises(NonFiniteGradientError, match="site 3"):
        source(model, Clipping(0.3), placement, names=names)((poisoned(inputs, 3), targets), 0)
    source(model, Clipping(0.3), placement, nonfinite="propagate")((poisoned(inputs, 3), targets), 0)
    assert not torch.isfinite(left(model)).all()


@in_processes(2, form=["hook", "two-level"])
def test_a_scaled_loss_changes_no_weight(form: str) -> None:
    rank, counts = dist.get_rank(), [2, 2] if form == "two-level" else [1, 1]
    inputs, targets = batches(sum(counts))
    model, own = network(), local(counts, rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    placed(model, Clipping(0.3), form, counts, scaler=scaler)((inputs[own], targets[own]), 0)
    update, _ = expected_update(Clipping(0.3), gradients_of(model, inputs, targets))
    torch.testing.assert_close(left(model).double() / 1024, update, rtol=1e-4, atol=1e-6)


@in_processes(2)
def test_half_precision_gradients_whose_squares_overflow_are_compared() -> None:
    model = ddp(network().half())
    hook = register_aggregation_hook(model, MGDA())
    inputs, targets = (each.half() for each in batches(2))
    (1e4 * (model(inputs[dist.get_rank()]) - targets[dist.get_rank()]).mean()).backward()
    assert hook.weights is not None
    torch.testing.assert_close(float(hook.weights.sum()), 1.0)
    assert torch.isfinite(left(model.module)).all()


# What a user can get wrong


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (lambda gram: gram.new_ones(2), r"rule Given: gives weights of shape \(2,\) for 4"),
        (lambda gram: gram[0] * torch.nan, "not finite at step 0"),
    ],
)
def test_wrong_weights_are_refused_and_no_gradient_is_left(weights: Any, found: str) -> None:
    model, (inputs, targets) = network(), batches(4)
    with pytest.raises(InputError, match=found):
        StackedGradients(model, mse_loss, Given(weights))((inputs, targets), 0)
    assert all(parameter.grad is None for parameter in model.parameters())


@in_processes(2, form=["hook", "two-level"])
def test_wrong_weights_are_refused_in_every_process(form: str) -> None:
    counts = [2, 2] if form == "two-level" else [1, 1]
    inputs, targets = batches(sum(counts))
    own = local(counts, dist.get_rank())
    gradients = placed(network(), Given(lambda gram: gram[0] * torch.nan), form, counts)
    with pytest.raises(InputError, match="rule Given: gives weights that are not finite at step 0"):
        gradients((inputs[own], targets[own]), 0)


def test_a_column_rule_of_another_shape_is_refused() -> None:
    class Flat:
        def combine(self, columns: Tensor) -> Tensor:
            return columns

    with pytest.raises(InputError, match=r"rule Flat: combine gives \(4, 96\) for gradients of shape \(4, 96\)"):
        StackedGradients(network(), mse_loss, Flat())(batches(4))


@pytest.mark.parametrize("rule", [PCGrad(), Median()], ids=["PCGrad", "Median"])
def test_where_a_rule_cannot_run_it_is_refused_by_name(rule: Any) -> None:
    where = f"rule {type(rule).__name__}: needs .*; it runs with StackedGradients, HookedGradients"
    with pytest.raises(InputError, match=where):
        per_example(network(), rule)
    with pytest.raises(InputError, match=where):
        PerExampleGradients(network(), mse_loss, rule)
    with pytest.raises(InputError, match=where):
        TemporalAgreementAdam(network().parameters(), rule)


def test_rescaling_what_drops_no_components_is_refused() -> None:
    with pytest.raises(ArgumentError, match="rescale=True: PCGrad drops no components; give False"):
        StackedGradients(network(), mse_loss, PCGrad(), rescale=True)


def test_gradients_above_the_limit_of_a_model_not_pooled_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    one = 4 * sum(parameter.numel() for parameter in model.parameters())
    needed = f"memory_limit: MGDA compares the gradients of 5 environments, which take {5 * one} bytes"
    with pytest.raises(InputError, match=needed):
        StackedGradients(model, mse_loss, MGDA(), memory_limit=2 * one)(batches(5))
    StackedGradients(model, mse_loss, MGDA(), memory_limit=5 * one)(batches(5))


def test_one_environment_has_its_own_gradient() -> None:
    model, (inputs, targets) = network(), batches(1)
    for rule in (PCGrad(), MGDA(), UPGrad(), Median(), TrimmedMean()):
        StackedGradients(model, mse_loss, rule)((inputs, targets), 0)
        rows = gradients_of(model, inputs, targets)
        torch.testing.assert_close(left(model).double(), rows[0], rtol=1e-4, atol=1e-6)


# Those of 12 environments are kept, those of 48 formed layer by layer.
@pytest.mark.parametrize(
    ("rule", "environments"),
    [
        (UPGrad(), 12),
        (Median(), 48),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((UPGrad(), 48), (Median(), 12), (TrimmedMean(0.2), 48))
        ),
    ],
)
def test_gradients_that_are_compared_take_little_more_memory_than_their_limit(rule: Rule, environments: int) -> None:
    model = nn.Sequential(nn.Linear(8, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
    limit = 64 << 20  # of 16 environments' gradients
    gradients = StackedGradients(model, mse_loss, rule, memory_limit=limit)
    batch = torch.randn(environments, 2, 8), torch.randn(environments, 2, 1)
    for _ in range(2):  # the first one chooses how
        with PeakMemory() as memory:
            gradients(batch)
        assert memory.peak < 1.25 * limit
    assert gradients.vectorize == "pooled"


@given(
    st.integers(1, 7), st.integers(1, 3), st.integers(9, 12), st.integers(9, 12), st.sampled_from([1, 1 << 10, 1 << 30])
)
@settings(max_examples=20, deadline=None)
def test_inner_products_by_examples_are_those_of_the_gradients_however_many_fit(
    groups: int, positions: int, m: int, n: int, memory: int
) -> None:
    generator = torch.Generator().manual_seed(groups)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    form = Product(draw(groups, m, positions), draw(groups, positions, n))
    gradients = form.of_groups(slice(None)).flatten(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_gradients, "_GRAM_BYTES", memory)
        torch.testing.assert_close(group_gradients.gram_of_groups(form, groups), gradients @ gradients.T)
