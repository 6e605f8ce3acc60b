"""A compiled rule takes the same steps, compiles once, and whatever cannot be compiled is computed as ever."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from own_rules import OWN_RULES
from recorder import Recorder
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from concord.aggregation import (
    AGGREGATORS,
    GRADIENT,
    SIGN,
    AndMask,
    Median,
    SandMask,
    Statistic,
    Statistics,
    TrimmedMean,
    Update,
    UPGrad,
    aggregator,
)
from concord.gradients import PerExampleGradients, StackedGradients, compiled, layer_gradients
from concord.gradients.group_gradients import StoredGradients
from concord.models import MLP

RULES: dict[str, Any] = {name: aggregator(name, 0.5) for name in AGGREGATORS}
RULES |= {"median": Median(), "trimmed-mean": TrimmedMean(0.2)} | OWN_RULES


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What was compiled, by a backend that traces as ever and runs no C++ compiler, which takes seconds."""
    from torch._dynamo.backends.debugging import aot_eager

    found: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return aot_eager(graph, inputs)

    yield from _with(backend, monkeypatch, found)


def _with(backend: Any, monkeypatch: pytest.MonkeyPatch, found: list[object]) -> Iterator[list[object]]:
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_function(function, backend=backend, **how))
    _forget()
    yield found
    _forget()


def _forget() -> None:
    """Forget what was compiled."""
    compiled._cached.cache_clear()
    layer_gradients._compiled.cache_clear()


def batch(step: int, environments: int = 6, examples: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(environments, examples, 5, generator=generator)
    return inputs, torch.randint(0, 3, (environments, examples), generator=generator)


def gradients_of(source: Callable[..., Any], rule: Any, *, batches: list[Any], **options: Any) -> list[list[Tensor]]:
    torch.manual_seed(0)
    model = MLP(5, 3, 8, 2)
    gradients = source(model, cross_entropy, rule, **options)
    found = []
    for each in batches:
        step = gradients(each)
        found.append([*(parameter.grad.clone() for parameter in model.parameters()), step.kept_fraction])
    return found


BATCHES = [batch(step) for step in range(3)]


# One rule of each kind; tracing one takes seconds.
TRACED = {
    ("and-mask", True),
    ("sand-mask", "pooled"),
    ("geometric-mean", True),
    ("median", True),
    *((n, "pooled") for n in OWN_RULES),
}
CASES = [
    pytest.param(name, way, marks=[] if (name, way) in TRACED else [pytest.mark.slow])
    for name in RULES
    for way in ("pooled", True)
]


@pytest.mark.parametrize(("name", "vectorize"), CASES)
def test_a_compiled_rule_gives_the_ordinary_gradients(
    name: str, vectorize: Any, graphs: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "majority-vote" and vectorize == "pooled":
        vectorize = False  # its sums do not tell whether gradients are finite
    ways = [
        gradients_of(StackedGradients, RULES[name], compile=way, batches=BATCHES, vectorize=vectorize)
        for way in (True, False)
    ]
    assert_close(*ways, rtol=1e-6, atol=1e-9)
    assert len(graphs) >= 1
    assert "not compiled" not in capsys.readouterr().err


def test_batches_of_other_sizes_compile_nothing_anew(graphs: list[object]) -> None:
    sizes = [7, 5, 7, 5, 7, 5]
    batches = [batch(step, examples=size) for step, size in enumerate(sizes)]
    gradients_of(StackedGradients, AndMask(0.5), compile=True, batches=batches[:2], vectorize=True)
    first = len(graphs)
    gradients_of(StackedGradients, AndMask(0.5), compile=True, batches=batches, vectorize=True)
    assert len(graphs) == first  # equal rules share what is compiled


def test_the_last_batch_of_fewer_examples_compiles_the_finish_once_more(graphs: list[object]) -> None:
    batches = [batch(step, 1, size) for step, size in enumerate([7, 7, 5, 7, 5, 7, 5])]
    ways = [gradients_of(PerExampleGradients, AndMask(0.5), compile=way, batches=batches) for way in (True, False)]
    assert_close(*ways, rtol=1e-6, atol=1e-9)
    finishes = [each for each in graphs if "ge_" in str(getattr(each, "code", ""))]
    assert len(finishes) == 2


def test_more_numbers_of_environments_than_are_compiled_are_computed_as_ever(
    graphs: list[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_MOST_FORMS", 2)
    batches = [batch(size, size) for size in (4, 5, 6, 7, 8, 4, 9)]
    ways = [
        gradients_of(StackedGradients, AndMask(0.5), compile=way, batches=batches, vectorize="pooled")
        for way in (True, False)
    ]
    assert_close(*ways, rtol=1e-6, atol=1e-9)
    assert capsys.readouterr().err.count("AndMask: compiled for 2 forms of its tensors") == 1
    assert len([each for each in graphs if "ge_" in str(getattr(each, "code", ""))]) == 2


@dataclass(frozen=True)
class Reading:
    """A rule that looks at a value."""

    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, SIGN)

    def finish(self, sums: Statistics, environments: int) -> Update:
        value = sums["gradient"] / environments
        return Update(value if float(sums["sign"].sum()) > 0 else -value, torch.ones_like(value))


def test_a_rule_that_reads_a_value_is_computed_as_ever_and_says_why_once(
    graphs: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    ways = [gradients_of(StackedGradients, Reading(), compile=way, batches=BATCHES) for way in (True, False)]
    assert_close(*ways, rtol=1e-6, atol=1e-9)
    assert capsys.readouterr().err.count("Reading: not compiled, since ") == 1


@dataclass
class Changing:
    """A rule whose number a program changes between steps."""

    factor: float = 1.0
    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        value = sums["gradient"] * self.factor / environments
        return Update(value, torch.ones_like(value))


@pytest.mark.usefixtures("graphs")
def test_a_rule_that_changes_is_compiled_anew() -> None:
    model, rule = MLP(5, 3, 8, 2), Changing()
    gradients = StackedGradients(model, cross_entropy, rule, compile=True)
    gradients(BATCHES[0])
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for factor in (2.0, 3.0):
        rule.factor = factor
        gradients(BATCHES[0])
        assert_close([parameter.grad for parameter in model.parameters()], [factor * each for each in before])


def test_a_compiled_result_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *given: [each * 1.1 if isinstance(each, Tensor) else each for each in graph(*given)]

    for _ in _with(wrong, monkeypatch, []):
        ways = [gradients_of(StackedGradients, AndMask(0.5), compile=way, batches=BATCHES) for way in (True, False)]
    assert_close(*ways, rtol=1e-6, atol=1e-9)
    assert capsys.readouterr().err.count("AndMask: not compiled, since its result is not the ordinary one") == 1


def test_a_machine_without_a_compiler_computes_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    for _ in _with(broken, monkeypatch, []):
        ways = [gradients_of(StackedGradients, AndMask(0.5), compile=way, batches=BATCHES) for way in (True, False)]
    assert_close(*ways, rtol=0, atol=0)
    errors = capsys.readouterr().err
    assert errors.count("AndMask: not compiled, since ") == 2  # the sums, and the finish
    assert errors.count("no compiler here") == 2


def test_a_weighting_says_that_nothing_of_it_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    gradients_of(StackedGradients, UPGrad(), compile=True, batches=BATCHES)
    assert capsys.readouterr().err.count("UPGrad: not compiled, since its weights are computed on the host") == 1


def test_a_recorded_step_holds_the_single_operations(graphs: list[object], recorder: Recorder) -> None:
    batches = [batch(step) for step in range(6)]
    ways = [
        gradients_of(StackedGradients, SandMask(0.5), compile=way, batches=batches, graph=True) for way in (True, False)
    ]
    assert_close(*ways, rtol=1e-6, atol=1e-9)
    assert recorder.replays > 0
    assert len(graphs) > 0


def test_a_source_with_a_compiled_rule_can_be_copied(graphs: list[object]) -> None:
    rule = StackedGradients(nn.Linear(2, 2), cross_entropy, AndMask(0.5), compile=True).aggregation.rule
    assert copy.copy(rule) == rule
    assert graphs == []  # nothing before the first step


def gradients_of_norms(source: Callable[..., Any], way: bool, train: bool, **options: Any) -> list[Tensor | None]:
    """Of a model with the norms that have a formula, two of them batch norms where examples are environments."""
    torch.manual_seed(0)
    each = source is PerExampleGradients
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(6)] if each else [nn.GroupNorm(2, 4), nn.GroupNorm(3, 6)]
    images = [nn.Conv2d(3, 4, 3), norms[0], nn.Conv2d(4, 6, 3), norms[1], nn.GroupNorm(2, 6), nn.Flatten()]
    model = nn.Sequential(*images, nn.LayerNorm(24), nn.Linear(24, 5), nn.RMSNorm(5), nn.Linear(5, 3)).train(train)
    gradients = source(model, cross_entropy, AndMask(0.5), compile=way, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(2, 6, 3, 6, 6, generator=generator)
        gradients((inputs, torch.randint(0, 3, (2, 6), generator=generator)))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        pytest.param(PerExampleGradients, {}, id="each"),
        pytest.param(StackedGradients, {"vectorize": "pooled"}, marks=pytest.mark.slow, id="pooled"),
    ],
)
def test_norms_are_compiled_once_for_layers_of_all_sizes(
    source: Callable[..., Any], options: dict[str, Any], graphs: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    ways = [gradients_of_norms(source, way, True, **options) for way in (True, False)]
    assert_close(*ways, rtol=1e-5, atol=1e-8)
    # Layer, group, RMS and batch norm; or the first three, and group norm once more for another number of groups.
    assert len([each for each in graphs if "norm" in str(getattr(each, "code", ""))]) == 4
    assert "not compiled" not in capsys.readouterr().err


def test_without_compile_no_norm_is_compiled(graphs: list[object]) -> None:
    gradients_of_norms(PerExampleGradients, False, True)
    assert graphs == []


@dataclass
class FormulaOfGain:
    """A formula of one's own that cannot be hashed, as a dataclass that may change."""

    summed: tuple[int, ...] = (1,)

    def __call__(self, _: nn.Module, inputs: Tensor, grad: Tensor) -> layer_gradients.Forms:
        return {"weight": StoredGradients((inputs * grad).sum(self.summed))}


class Gain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


def test_a_formula_of_one_s_own_is_used_beside_compiled_norms(
    graphs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(layer_gradients.LAYERS, Gain, FormulaOfGain())

    def gradients(way: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), Gain(8), nn.LayerNorm(8), nn.Linear(8, 3))
        StackedGradients(model, cross_entropy, AndMask(0.5), vectorize="pooled", compile=way)(batch(0))
        return [parameter.grad for parameter in model.parameters()]

    assert_close(gradients(True), gradients(False), rtol=1e-5, atol=1e-8)
    assert graphs != []


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
def test_inductor_gives_the_ordinary_gradients_of_norms(train: bool, capsys: pytest.CaptureFixture[str]) -> None:
    _forget()
    ways = [gradients_of_norms(PerExampleGradients, way, train) for way in (True, False)]
    assert_close(*ways, rtol=1e-4, atol=1e-6)
    assert "not compiled" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_inductor_gives_the_ordinary_gradients(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _forget()
    ways = [gradients_of(StackedGradients, RULES[name], compile=way, batches=BATCHES) for way in (True, False)]
    assert_close(*ways, rtol=1e-4, atol=1e-7)
    assert "not compiled" not in capsys.readouterr().err
