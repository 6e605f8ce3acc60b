"""A step that would be captured as a CUDA graph is recorded on a CPU: its replays give what ordinary steps give."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operations import Operations
from own_rules import GradDrop
from recorder import Recorder
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from concord.aggregation import AndMask, GeometricMean, Mean, Median, PCGrad, UPGrad
from concord.aggregation.asynchronous import as_asynchronous
from concord.gradients import NonFiniteGradientError, PerExampleGradients, StackedGradients, per_example
from concord.models import MLP

ENVIRONMENTS, EXAMPLES, WIDTH, STEPS = 4, 3, 5, 7
REPLAYS = STEPS - 3  # one of them is compared with the ordinary step, whose result counts

RULES = {"and-mask": AndMask(0.5), "mean": Mean(), "geometric mean": GeometricMean(), "median": Median()}


def network() -> nn.Module:
    torch.manual_seed(0)
    return MLP(WIDTH, 3, 8, 2)


def batch(step: int, environments: int = ENVIRONMENTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(environments, EXAMPLES, WIDTH, generator=generator)
    return inputs, torch.randint(0, 3, (environments, EXAMPLES), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def trained(
    made: nn.Module,
    source: Callable[[nn.Module], Any],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    batch_of: Callable[[int], Any] = batch,
) -> tuple[nn.Module, list[Any], Any]:
    """A copy of the model after some steps, the steps, and the source of its gradients."""
    model = copy.deepcopy(made)
    gradients, optimized = source(model), optimizer(model)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)  # of dropout
        found.append(gradients(batch_of(step)))
        optimized.step()
    return model, found, gradients


def assert_equal(found: tuple[nn.Module, list[Any], Any], expected: tuple[nn.Module, list[Any], Any]) -> None:
    for one, other in zip(found[0].state_dict().values(), expected[0].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one.losses, other.losses)
        assert torch.equal(one.kept_fraction, other.kept_fraction)
        assert torch.equal(one.weights, other.weights)


def of_examples(rule: Any, *, graph: bool) -> Callable[[nn.Module], Any]:
    """A loop of one's own."""

    def source(model: nn.Module) -> Any:
        examples = per_example(model, rule, graph=graph)

        def compute(inputs: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(model(inputs.flatten(0, 1)), targets.flatten())

        return lambda both: examples.backward(compute, *both)

    return source


SOURCES: dict[str, Callable[..., Callable[[nn.Module], Any]]] = {
    "pooled": lambda rule, graph: lambda m: StackedGradients(m, cross_entropy, rule, vectorize="pooled", graph=graph),
    "vmap": lambda rule, graph: lambda m: StackedGradients(m, cross_entropy, rule, vectorize=True, graph=graph),
    "one by one": lambda rule, graph: lambda m: StackedGradients(m, cross_entropy, rule, vectorize=False, graph=graph),
    "examples": lambda rule, graph: lambda m: PerExampleGradients(m, cross_entropy, rule, graph=graph),
    "examples in a loop": lambda rule, graph: of_examples(rule, graph=graph),
}


OF_BOTH = [
    (rule, source) for rule in RULES for source in SOURCES if not (rule == "median" and source.startswith("examples"))
]  # the examples' gradients, of which a median would be, are nowhere


# Each rule and each source; the other pairs are for ``make test-slow``.
QUICK = {(rule, "pooled") for rule in RULES} | {(next(iter(RULES)), source) for source in SOURCES}


@pytest.mark.parametrize(
    ("rule", "source"), [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in OF_BOTH]
)
def test_replays_give_what_ordinary_steps_give_to_the_bit(rule: str, source: str, recorder: Recorder) -> None:
    made = network()
    found, expected = (trained(made, SOURCES[source](RULES[rule], graph)) for graph in (True, False))
    assert recorder.replays == REPLAYS
    assert_equal(found, expected)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def normalizing() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("source", ["pooled", "vmap", "examples"])
@pytest.mark.parametrize("model", [dropping, normalizing])
def test_dropout_draws_anew_and_statistics_move_on(
    model: Callable[[], nn.Module],
    source: str,
    recorder: Recorder,
) -> None:
    torch.manual_seed(0)
    made = model()
    choice = "vmap" if source == "pooled" and model is dropping else source
    found, expected = (trained(made, SOURCES[choice](AndMask(0.5), graph)) for graph in (True, False))
    assert recorder.replays == REPLAYS
    assert_equal(found, expected)


def test_inputs_parameters_gradients_and_momenta_stay_where_they_are(recorder: Recorder) -> None:
    model = network()
    optimizer = sgd(model)
    gradients = StackedGradients(model, cross_entropy, AndMask(0.5), graph=True)
    places = []
    for step in range(STEPS):
        gradients(batch(step))
        optimizer.step()
        if recorder.replays > 1:
            state = [each["momentum_buffer"] for each in optimizer.state.values()]
            parameters = list(model.parameters())
            tensors = [*parameters, *(each.grad for each in parameters if each.grad is not None), *state]
            places.append([each.data_ptr() for each in tensors])
    (graph,) = recorder.graphs
    assert len(places) == REPLAYS - 1
    assert all(each == places[0] for each in places)
    assert len(places[0]) == 3 * len(list(model.parameters()))
    held = {each.data_ptr() for each in (*graph.parameters(), *graph.buffers())}
    assert {each.data_ptr() for each in model.parameters()} <= held


@pytest.mark.parametrize("source", SOURCES)
def test_the_host_reads_nothing_in_what_is_recorded(source: str) -> None:
    read: list[Operations] = []

    def capture(work: Callable[[], Any], device: torch.device) -> Any:
        with Operations() as operations:
            work()
        read.append(operations)
        raise RuntimeError("seen")

    with pytest.MonkeyPatch.context() as patch, as_asynchronous():
        patch.setattr("concord.gradients.step_graph.can_capture", lambda device: True)
        patch.setattr("concord.gradients.step_graph.capture", capture)
        trained(network(), SOURCES[source](AndMask(0.5), True))
    (operations,) = read
    assert dict(operations.reads) == {}


class Reading(nn.Module):
    """A model that looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.layer(inputs)
        return logits * 2 if logits.detach().sum().item() > 0 else logits


def by_step(model: nn.Module, both: Any, step: int) -> Tensor:
    return cross_entropy(model(both[0]), both[1]) * (1 + step)


ORDINARY: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a model that reads": (
        lambda m: StackedGradients(Reading(), cross_entropy, Mean(), vectorize=False, graph=True),
        "trying to get value out of a tracing tensor",
    ),
    "a weighting": (lambda m: StackedGradients(m, cross_entropy, UPGrad(), graph=True), "UPGrad reads the gradients'"),
    "a weighting that draws": (lambda m: StackedGradients(m, cross_entropy, PCGrad(), graph=True), "PCGrad reads the"),
    "a rule that draws": (lambda m: StackedGradients(m, cross_entropy, GradDrop(), graph=True), "draws by the step's"),
    "a risk of the step": (lambda m: StackedGradients(m, by_step, Mean(), graph=True), "uses the step's number"),
    "momentum": (
        lambda m: StackedGradients(m, cross_entropy, Mean(), environment_momentum=0.5, graph=True),
        "environment_momentum follows",
    ),
    "a scaler": (
        lambda m: StackedGradients(m, cross_entropy, Mean(), scaler=torch.amp.GradScaler("cpu"), graph=True),
        "the host reads the scale of the loss",
    ),
}


@pytest.mark.parametrize("what", ORDINARY)
def test_what_cannot_be_recorded_goes_the_ordinary_way_and_says_why_once(
    what: str,
    recorder: Recorder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, reason = ORDINARY[what]
    trained(network(), source)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("a step is computed without")]
    assert len(lines) == 1
    assert reason in lines[0]
    assert recorder.replays == 0


def test_a_cpu_computes_the_ordinary_way_and_says_why_once(capsys: pytest.CaptureFixture[str]) -> None:
    made = network()
    found, expected = (trained(made, SOURCES["pooled"](AndMask(0.5), graph)) for graph in (True, False))
    assert_equal(found, expected)
    assert capsys.readouterr().err.count("without a CUDA graph: the model is not on a GPU") == 1


def test_another_shape_is_computed_the_ordinary_way(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    made = network()

    def of_two_sizes(step: int) -> tuple[Tensor, Tensor]:
        return batch(step, ENVIRONMENTS + (step == STEPS - 2))

    found, expected = (
        trained(made, SOURCES["vmap"](AndMask(0.5), graph), batch_of=of_two_sizes) for graph in (True, False)
    )
    assert_equal(found, expected)
    assert recorder.replays == REPLAYS - 1
    assert capsys.readouterr().err.count("is not that of the captured one") == 1


@pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
def test_what_is_not_finite_is_treated_as_without_a_graph(policy: Any, recorder: Recorder) -> None:
    made = normalizing()
    results = []
    for graph in (True, False):
        model = copy.deepcopy(made)
        gradients = StackedGradients(model, cross_entropy, AndMask(0.5), vectorize=True, nonfinite=policy, graph=graph)
        for step in range(STEPS):
            gradients(batch(step))
        inputs, targets = batch(STEPS)
        inputs[1] = torch.inf
        if policy == "raise":
            with pytest.raises(NonFiniteGradientError, match="environment 1 is not finite at step 7"):
                gradients((inputs, targets))
        else:
            step = gradients((inputs, targets))
            results.append((step.losses, [each.grad for each in model.parameters()]))
            assert step.skipped == (("environment 1",) if policy == "skip" else ())
        results.append(list(model.buffers()))
    assert recorder.replays == REPLAYS + 1
    half = len(results) // 2
    assert_close(results[:half], results[half:], rtol=0, atol=0, equal_nan=True)


def test_a_replay_that_gives_something_else_is_not_used(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return cross_entropy(outputs, targets) * len(calls)  # a number of the host, which a recording keeps

    model = network()
    gradients = StackedGradients(model, loss, Mean(), vectorize=True, graph=True)
    for step in range(STEPS):
        gradients(batch(step))
    assert recorder.replays == 1
    assert capsys.readouterr().err.count("a replay gave something else than the ordinary step") == 1


def test_a_source_with_a_graph_is_freed_with_its_last_reference(recorder: Recorder) -> None:
    gradients = trained(network(), SOURCES["pooled"](AndMask(0.5), True))[2]
    reference = weakref.ref(gradients)
    recorder.graphs.clear()
    del gradients
    assert reference() is None
