"""Distillation: the meta-gradient is exact, the teacher learns between student steps, only training uses x*."""

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_group
from recorded import Kept
from small_students import BY_LABEL, CONFIG, INPUTS, PRIVILEGED, UNITS, metrics_of, small_student, small_teacher
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from concord.distillation import (
    SGD,
    Adam,
    Distillation,
    GatedError,
    MetaLearning,
    OptimizerState,
    Rule,
    Student,
    Teaching,
    as_rule,
    divergence,
    inner_outer,
    meta_gradient,
    privileged_of,
    squared_error,
    with_privileged,
)
from concord.distillation.meta_gradient import bounded
from concord.environments import BatchStream, Environment, Environments
from concord.errors import InputError
from concord.gradients import NonFiniteGradientError
from concord.gradients.risk import as_risk
from concord.objectives import ERM
from concord.training import Job, ProcessContext, load_job, train
from concord.training.context import Silent

BATCH = 6


def network(seed: int = 0) -> nn.Sequential:
    """Smooth, so that central differences converge."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, UNITS), nn.Tanh(), nn.Linear(UNITS, 1)).double()


def teacher_network(outputs: int = UNITS) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(PRIVILEGED, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def batch(seed: int, examples: int = BATCH) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(examples, INPUTS + 1 + PRIVILEGED, generator=torch.Generator().manual_seed(seed)).double()
    return drawn[:, :INPUTS], drawn[:, INPUTS:]


def student_of(model: nn.Module, weight: float = 3.0, **options: Any) -> Student:
    return Student(model, as_risk(BY_LABEL), Teaching(weight, layers=("0",), **options))


def warm(rule: Rule, model: nn.Module, steps: int = 3) -> OptimizerState:
    """The state after some steps on gradients of another kind."""
    weights, state = [each.detach() for each in model.parameters()], None
    for seed in range(steps):
        generator = torch.Generator().manual_seed(100 + seed)
        gradients = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in weights]
        weights, state = rule.step(weights, gradients, state or rule.start(weights))
    assert state is not None
    return state


# --- optimizers


RULES: dict[str, tuple[Rule, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (SGD(0.1, 0.75, 1e-2), lambda p: torch.optim.SGD(p, 0.1, 0.75, weight_decay=1e-2)),
    "adam": (Adam(0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adam, others": (
        Adam(0.05, 0.5, 0.9, 1e-4, 1e-2),
        lambda p: torch.optim.Adam(p, 0.05, (0.5, 0.9), 1e-4, weight_decay=1e-2),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_an_unrolled_optimizer_takes_the_steps_of_torchs(name: str) -> None:
    rule, of_torch = RULES[name]
    model = network()
    optimizer = of_torch(model.parameters())
    weights = [each.detach().clone() for each in model.parameters()]
    state = rule.start(weights)
    for seed in range(8):
        if seed == 4:  # and goes on from where torch's is
            read, state = as_rule(optimizer, list(model.parameters()))
            assert read == rule
        model.zero_grad()
        BY_LABEL(model(batch(seed)[0]), batch(seed)[1]).backward()
        weights, state = rule.step(weights, [each.grad for each in model.parameters()], state)
        optimizer.step()
        assert_close(weights, [each.detach() for each in model.parameters()], rtol=1e-12, atol=1e-14)


def test_adam_where_no_gradient_ever_came_has_a_finite_derivative() -> None:
    weight = torch.zeros(3, dtype=torch.float64)
    gradient = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    (following,), state = Adam(0.1).step([weight], [gradient], Adam(0.1).start([weight]))
    slopes = torch.autograd.grad(following.sum() + state.second[0].sum(), gradient)[0]
    assert torch.isfinite(slopes).all()


def test_an_optimizer_that_cannot_be_unrolled_is_refused() -> None:
    parameters = list(network().parameters())
    for made, said in [
        (torch.optim.AdamW(parameters), "AdamW: its steps cannot be unrolled; give adam or sgd"),
        (torch.optim.SGD(parameters, 0.1, 0.9, nesterov=True), "SGD: its steps with nesterov cannot be unrolled"),
        (torch.optim.Adam(parameters, amsgrad=True), "Adam: its steps with amsgrad cannot be unrolled"),
        (torch.optim.SGD(parameters[:2], 0.1), "SGD: it has to have the student's parameters in one group"),
    ]:
        with pytest.raises(InputError, match=said):
            as_rule(made, parameters)


# --- the meta-gradient


def meta_loss(model: nn.Module, teacher: nn.Module, rule: Rule, state: Any, steps: int, phi: list[Tensor]) -> Tensor:
    """By hand: the whole graph, the teacher called anew in each step."""
    names = [name for name, _ in model.named_parameters()]
    told = dict(zip([name for name, _ in teacher.named_parameters()], phi, strict=True))
    weights = [each.detach().requires_grad_() for each in model.parameters()]
    for index in range(steps):
        inputs, targets = batch(index)
        hidden = inputs @ weights[0].T + weights[1]
        outputs = torch.tanh(hidden) @ weights[2].T + weights[3]
        said = functional_call(teacher, told, (targets[:, 1:],))
        loss = mse_loss(outputs.squeeze(1), targets[:, 0]) + 3.0 * mse_loss(hidden, said)
        weights, state = rule.step(weights, torch.autograd.grad(loss, weights, create_graph=True), state)
    inputs, targets = batch(99, 20)
    return mse_loss(functional_call(model, dict(zip(names, weights, strict=True)), (inputs,)).squeeze(1), targets[:, 0])


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adam, others"])
@pytest.mark.parametrize("start", ["fresh", "warm"])
def test_the_meta_gradient_is_exact(name: str, steps: int, start: str) -> None:
    rule, model, teacher = RULES[name][0], network(), teacher_network()
    state = warm(rule, model) if start == "warm" else rule.start(list(model.parameters()))
    found = meta_gradient(
        student_of(model), teacher, [batch(each) for each in range(steps)], batch(99, 20), rule, state,
        privileged=privileged_of,
    )  # fmt: skip
    phi = [each.detach().clone().requires_grad_() for each in teacher.parameters()]
    loss = partial(meta_loss, model, teacher, rule, state, steps)
    # The graph that is cut at the targets is the whole graph.
    assert_close(found.loss, loss(phi).detach(), rtol=1e-12, atol=0)
    assert_close(found.gradients, torch.autograd.grad(loss(phi), phi), rtol=1e-9, atol=1e-13)
    # And its derivative that of central differences, along random directions.
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        way = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in phi]
        width = 1e-4
        ahead, behind, twice, half = (
            float(loss([(p + at * width * w).detach() for p, w in zip(phi, way, strict=True)]).detach())
            for at in (1, -1, 2, -2)
        )
        difference = (8 * (ahead - behind) - (twice - half)) / (12 * width)
        slope = sum(float((g * w).sum()) for g, w in zip(found.gradients, way, strict=True))
        # Adam's first step is lr · g / (|g| + ε), whose derivative is nearly 0: below what differences resolve.
        assert slope == pytest.approx(difference, rel=1e-6, abs=1e-11 if abs(slope) < 1e-6 else 0)


def test_one_step_of_a_linear_student_has_the_closed_form() -> None:
    # -lr α ∂²L_t/∂φ∂θ ∇L_outer: with h = x·w and h* = x*·φ, ∂²L_t/∂φ∂w is -2 mean x* xᵀ.
    model = nn.Linear(INPUTS, 1, bias=False).double()
    teacher = nn.Linear(PRIVILEGED, 1, bias=False).double()
    lr, alpha, (inputs, targets), outer = 0.3, 2.0, batch(0), batch(1)
    student = Student(model, as_risk(BY_LABEL), Teaching(alpha))
    found = meta_gradient(student, teacher, [(inputs, targets)], outer, SGD(lr), privileged=privileged_of)
    student.loss((inputs, targets), teacher(targets[:, 1:]).detach())[0].backward()
    moved = (model.weight - lr * model.weight.grad).detach()
    slope = 2 * ((outer[0] @ moved[0] - outer[1][:, 0]).unsqueeze(1) * outer[0]).mean(0)
    expected = lr * alpha * 2 * (targets[:, 1:].T @ inputs / BATCH) @ slope
    assert_close(found.gradients[0][0], expected, rtol=1e-10, atol=1e-14)


def test_a_meta_step_leaves_the_student_as_it_was_bit_by_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, UNITS), nn.BatchNorm1d(UNITS), nn.ReLU(), nn.Linear(UNITS, 1)).double()
    before = copy.deepcopy(model.state_dict())
    state = warm(Adam(0.1), model)
    moments = copy.deepcopy(state)
    batches = [batch(each) for each in range(3)]
    meta_gradient(student_of(model), teacher_network(), batches, batch(9), Adam(0.1), state, privileged=privileged_of)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(map(torch.equal, state.first + state.second, moments.first + moments.second))
    assert model.training
    assert all(each.grad is None for each in model.parameters())


def test_a_teacher_with_batch_norm_normalizes_each_batch_by_itself() -> None:
    teacher = nn.Sequential(nn.Linear(PRIVILEGED, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, UNITS)).double()
    apart = [batch(0), tuple(5 + leaf for leaf in batch(1))]
    model, given = network(), {"privileged": privileged_of}
    found = meta_gradient(student_of(model), teacher, apart, batch(9), SGD(0.1), **given)
    phi = [each.detach().clone().requires_grad_() for each in teacher.parameters()]
    names = [name for name, _ in teacher.named_parameters()]
    weights = [each.detach().requires_grad_() for each in model.parameters()]
    for inputs, targets in apart:
        hidden = inputs @ weights[0].T + weights[1]
        outputs = torch.tanh(hidden) @ weights[2].T + weights[3]
        said = functional_call(teacher, dict(zip(names, phi, strict=True)), (targets[:, 1:],))
        loss = mse_loss(outputs.squeeze(1), targets[:, 0]) + 3.0 * mse_loss(hidden, said)
        weights, _ = SGD(0.1).step(weights, torch.autograd.grad(loss, weights, create_graph=True), OptimizerState())
    inputs, targets = batch(9)
    outputs = torch.tanh(inputs @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
    expected = torch.autograd.grad(mse_loss(outputs.squeeze(1), targets[:, 0]), phi)
    assert_close(found.gradients, expected, rtol=1e-9, atol=1e-13)


def test_a_weight_of_0_teaches_nothing_and_has_no_meta_gradient() -> None:
    found = meta_gradient(
        student_of(network(), 0.0), teacher_network(), [batch(0), batch(1)], batch(9), Adam(0.1),
        privileged=privileged_of,
    )  # fmt: skip
    assert all(torch.equal(each, torch.zeros_like(each)) for each in found.gradients)


def test_a_meta_gradient_is_bounded_and_single_gaps_are_filled() -> None:
    given = torch.tensor([1.0, math.nan, 1e30, -math.inf])
    assert bounded(given).tolist() == [1.0, 0.0, 1e8, -1e8]
    assert bounded(torch.full((2,), math.nan)).isnan().all()


# --- what is taught


def test_the_teaching_losses_are_their_formulas() -> None:
    told, taught = batch(0)[0], batch(1)[0]
    assert_close(squared_error(told, taught), (told - taught).square().mean())
    p, q = taught.softmax(1), told.softmax(1)
    assert_close(divergence(told, taught), (p * (p / q).log()).sum(1).mean())
    gates = batch(2)[0]
    expected = (torch.sigmoid(gates / 2 - 1) * (told - taught) ** 2).mean()
    assert_close(GatedError(2.0, 1.0)(told, (taught, gates)), expected)


def test_several_layers_are_taught_at_once() -> None:
    model, inputs = network(), batch(0)
    targets = torch.ones(BATCH, UNITS).double(), torch.zeros(BATCH, 1).double()
    loss, weight = Student(model, as_risk(BY_LABEL), Teaching(2.0, layers=("1", "2"))).loss(inputs, targets)
    hidden = torch.tanh(model[0](inputs[0]))
    outputs = model[2](hidden)
    expected = BY_LABEL(outputs, inputs[1]) + 2.0 * ((hidden - 1).square().mean() + outputs.square().mean())
    assert_close(loss, expected)
    assert weight == BATCH


# --- on the platform's loop


def examples(name: str) -> tuple[Tensor, Tensor]:
    """x* determines the label; for test data x* is unknown."""
    seed = sum(map(ord, name))
    inputs, drawn = batch(seed, 40)
    labels = inputs[:, 0] * inputs[:, 1]
    privileged = torch.stack([inputs[:, 0], inputs[:, 1], drawn[:, 0]], 1)
    known = torch.zeros_like(privileged) if name.startswith("test") else privileged
    return inputs.float(), with_privileged(labels, known)


def job(weight: float = 1.0, environments: int = 2, inner: int = 3, real: int = 2, **meta: Any) -> Job[Any]:
    names = ["a", "b", "c"][:environments]
    learning = MetaLearning(lambda: examples("outer"), inner, real, **meta)
    teaching = Teaching(weight, layers=("0",))
    return Job(
        lambda _: Environments(examples, train=names, test=["test"]),
        small_student,
        BY_LABEL,
        objective=lambda _: Distillation(BY_LABEL, small_teacher, teaching, learning),
        criterion="ood_loss",
        mode="min",
    )


def test_the_alternation_is_the_plain_loop_of_the_algorithm() -> None:
    """A meta-step from the student's weights and its Adam's moments, then N steps with the new teacher; all by hand."""
    given = job(environments=1)
    torch.manual_seed(CONFIG.run.seed)
    model = given.model(CONFIG)
    teacher = small_teacher()
    adam, meta = torch.optim.Adam(model.parameters(), 1e-2), torch.optim.Adam(teacher.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [5, 8])
    stream = BatchStream([given.environments(CONFIG)["a"]], 8, CONFIG.run.seed)
    student = student_of(model, 1.0)
    for step in range(10):
        if step % 2 == 0:
            rule, state = as_rule(adam, list(model.parameters()))
            coming = [tuple(leaf[0] for leaf in stream.batch(step + ahead)) for ahead in range(3)]
            found = meta_gradient(student, teacher, coming, examples("outer"), rule, state, privileged=privileged_of)
            for parameter, gradient in zip(teacher.parameters(), found.gradients, strict=True):
                parameter.grad = gradient
            meta.step()
        inputs, targets = (leaf[0] for leaf in stream.batch(step))
        adam.zero_grad()
        student.loss((inputs, targets), teacher(targets[:, 1:]).detach())[0].backward()
        adam.step()
        schedule.step()
    expected = BY_LABEL(model(examples("test")[0]), examples("test")[1]).item()
    assert metrics_of(given)["ood_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_weight_of_0_trains_as_without_a_teacher_bit_by_bit() -> None:
    class Alone(ERM):
        coupled = True  # the same source of gradients

    def by_label(model: nn.Module, batch: Any, step: int) -> Tensor:
        return BY_LABEL(model(batch[0]), batch[1])

    taught = job(weight=0.0)
    alone = dataclasses.replace(taught, objective=lambda _: Alone(by_label))
    assert of_student(metrics_of(taught)) == metrics_of(alone)
    assert of_student(metrics_of(job(weight=1.0))) != metrics_of(alone)


def of_student(metrics: dict[str, float]) -> dict[str, float]:
    """All but what the teacher is judged by, which nobody is without a teacher, and others are with other copies."""
    return {name: value for name, value in metrics.items() if name != "objective/meta_loss"}


def thirty_two(name: str) -> tuple[Tensor, Tensor]:
    inputs, targets = examples(name)
    return inputs[:32], targets[:32]


def drawn_anew(
    inner: int = 3, real: int = 2, make: Callable[[str], Any] = thirty_two, fraction: float = 0.5
) -> Job[Any]:
    """The split is another for each step of the teacher: 32 examples, four batches of 8 a pass."""
    learning = MetaLearning(None, inner, real, validation_fraction=fraction)
    return dataclasses.replace(
        job(),
        environments=lambda _: Environments(make, train=["a", "b"], test=["test"]),
        objective=lambda _: Distillation(BY_LABEL, small_teacher, Teaching(1.0, layers=("0",)), learning),
    )


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Tensor], Tensor]]:
    """The inputs of each split, to train on and to judge by, as they are used."""
    splits: list[tuple[list[Tensor], Tensor]] = []

    def recorded(student: Student, teacher: nn.Module, batches: Any, outer: Any, *rest: Any, **options: Any) -> Any:
        splits.append(([inputs for inputs, _ in batches], outer[0]))
        return meta_gradient(student, teacher, batches, outer, *rest, **options)

    monkeypatch.setattr("concord.distillation.distillation.meta_gradient", recorded)
    return splits


@pytest.mark.parametrize(("real", "fraction", "judging"), [(2, 0.5, 2), (1, 0.5, 2), (1, 0.25, 1), (2, 0.1, 1)])
def test_a_split_that_is_drawn_anew_judges_by_a_fraction_of_the_pass(
    real: int, fraction: float, judging: int, splits: list[tuple[list[Tensor], Tensor]]
) -> None:
    training = 4 - judging
    given = drawn_anew(inner=training + 1, real=real, fraction=fraction)
    model, ours = given.model(CONFIG), given.objective(CONFIG)
    data = [Environment(name, *thirty_two(name)) for name in ("a", "b")]
    stream = BatchStream(data, 8, 0)
    ours.begin(model, 2, 8)
    ours.attach(stream.batch, torch.optim.SGD(model.parameters(), 0.1), 4)
    judged_by = set()
    for step in range(0, 16, real):
        splits.clear()
        ours.prepare(model, step, [0, 1], lambda total: total)
        for index, (environment, (inner, outer)) in enumerate(zip(data, splits, strict=True)):
            whole = [stream.batch(at)[0][index] for at in range(step - step % 4, step - step % 4 + 4)]
            expected = [stream.batch(step + at)[0][index] for at in range(real)]
            assert all(torch.equal(*pair) for pair in zip(inner[:real], expected, strict=True))
            assert torch.equal(inner[training], inner[0])  # in cycles
            seen = torch.cat([*inner[:training], outer])
            assert len(outer) == 8 * judging
            assert sorted(seen.tolist()) == sorted(environment.inputs.tolist())
            judged_by |= {
                (at - step) % 4 for at in range(4) if any(torch.equal(whole[at], part) for part in outer.split(8))
            }
    assert judged_by == set(range(real, 4))  # any other batch of the pass judges at some step


def repeated(name: str) -> tuple[Tensor, Tensor]:
    """32 examples, of which each is there twice."""
    return tuple(leaf[:16].repeat(2, *(1 for _ in leaf.shape[1:])) for leaf in examples(name))  # type: ignore[return-value]


@pytest.mark.parametrize("real", [3, 5, 6])
@pytest.mark.parametrize("make", [thirty_two, repeated])
def test_steps_that_reach_into_the_next_pass_are_judged_by_other_examples(
    real: int, make: Any, splits: list[tuple[list[Tensor], Tensor]]
) -> None:
    """Eight batches of 4 a pass, of which two judge: N divides none of the passes."""
    given = drawn_anew(inner=7, real=real, make=make, fraction=0.25)
    model, ours = given.model(CONFIG), given.objective(CONFIG)
    data = [Environment(name, *make(name)) for name in ("a", "b")]
    stream = BatchStream(data, 4, 0)
    ours.begin(model, 2, 24)
    ours.attach(stream.batch, torch.optim.SGD(model.parameters(), 0.1), 8)
    times = 2 if make is repeated else 1
    for step in range(0, 24, real):
        splits.clear()
        ours.prepare(model, step, [0, 1], lambda total: total)
        for index, (environment, (inner, outer)) in enumerate(zip(data, splits, strict=True)):
            coming = [stream.batch(step + at)[0][index] for at in range(real)]
            assert all(torch.equal(*pair) for pair in zip(inner[:real], coming, strict=True))
            assert torch.equal(inner[6], inner[0])  # in cycles, after all six that do not judge
            used = Counter(map(tuple, torch.cat([*inner[real:6], outer]).tolist()))
            there = Counter(map(tuple, environment.inputs.tolist()))
            assert set(there.values()) == {times}
            assert used.total() == 4 * (8 - real)
            assert used <= there, "no example twice"
            before_next_pass = torch.cat(coming[: 8 - step % 8]).tolist()
            assert not {*map(tuple, before_next_pass)} & {key for key, count in used.items() if count == times}
            if make is thirty_two:
                assert not {*map(tuple, torch.cat(coming).tolist())} & used.keys(), "nobody judges what it trained"


def _on_several(rank: int, world_size: int, folder: Path) -> None:
    for given in (job(), drawn_anew(), drawn_anew(real=3, fraction=0.25)):
        alone = metrics_of(given)
        together = metrics_of(given, CONFIG, ProcessContext(rank, world_size))
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            assert together[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_placement_over_two_workers_changes_nothing(tmp_path: Path) -> None:
    run_group(_on_several, 2, tmp_path, tmp_path)


def test_a_resumed_run_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    whole = CONFIG.with_options(epochs=4, evaluations=1, milestones=())
    half = whole.with_options(epochs=2)
    kept = Kept(tmp_path)
    train(job(), half, ProcessContext(), kept)
    resumed = train(job(), whole, ProcessContext(), Silent(), resume_from=kept.checkpoints[-1]).metrics
    assert resumed["ood_loss"] == metrics_of(job(), whole)["ood_loss"]


def test_what_the_copies_draw_the_student_draws_too() -> None:
    """Dropout: with a weight of 0 the run is that of any number of inner steps."""

    def dropping(_: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, UNITS), nn.Dropout(0.5), nn.Linear(UNITS, 1))

    one, five = (dataclasses.replace(job(weight=0.0, inner=n), model=dropping) for n in (1, 5))
    assert of_student(metrics_of(one)) == of_student(metrics_of(five))


def test_privileged_information_is_not_read_at_test() -> None:
    def with_nonsense(name: str) -> tuple[Tensor, Tensor]:
        inputs, targets = examples(name)
        if name == "test":
            targets = torch.cat([targets[:, :1], torch.full_like(targets[:, 1:], 1e9)], 1)
        return inputs, targets

    told = dataclasses.replace(job(), environments=lambda _: Environments(with_nonsense, ["a", "b"], test=["test"]))
    assert metrics_of(told) == metrics_of(job())


@pytest.mark.parametrize("teacher", ["meta", "none", "fixed", "oracle"])
@pytest.mark.parametrize("resample", [True, False])
def test_task_a_trains_with_every_teacher(teacher: str, resample: bool) -> None:
    given = load_job("distill-xor").job
    options = {"dimensions": 8, "examples": 64, "epochs": 1, "student_steps": 2, "unrolled_steps": 3}
    config = given.config.with_options(teacher=teacher, resample_split=resample, **options)
    config.check()
    assert 0 <= metrics_of(given, config)["ood_accuracy"] <= 1


def test_task_a_is_what_it_is_said_to_be() -> None:
    given = load_job("distill-xor").job
    inputs, targets = given.environments(given.config.with_options(teacher="none", examples=20_000))["train"].data
    labels, hidden = targets[:, 0], targets[:, 1:3] * targets[:, 3:]
    assert torch.equal(labels, ((hidden > 0).sum(1) % 2).float())
    # The two numbers differ in sign as often as the angle between the rows of A says: on average over A half the time.
    angle = math.acos(float(torch.corrcoef(hidden.T)[0, 1])) / math.pi
    assert labels.mean().item() == pytest.approx(angle, abs=0.02)
    assert angle == pytest.approx(0.5, abs=0.1)
    correlations = inputs.T @ targets[:, 1:] / len(inputs)  # E[x* | x] = 0
    assert correlations.abs().max() < 5 / len(inputs) ** 0.5


# --- what is refused


def parts(fraction: float = 0.5, batch_size: int = 1, count: int = 10) -> Any:
    return inner_outer(examples("a")[0][:count], fraction, 0, batch_size)


def test_the_parts_are_disjoint_and_constant() -> None:
    data = torch.arange(11)
    inner, outer = inner_outer(data, 0.3, 4)
    assert len(outer) == 3
    assert torch.equal(torch.cat([inner, outer]).sort().values, data)
    assert all(map(torch.equal, inner_outer(data, 0.3, 4), (inner, outer)))


def initialized(teacher: Callable[[], nn.Module] = small_teacher, **teaching: Any) -> Distillation:
    ours = Distillation(BY_LABEL, teacher, Teaching(1.0, **{"layers": ("0",)} | teaching), MetaLearning(lambda: None))
    ours.begin(network(), 1, 1)
    return ours


def wrong_shape() -> None:
    model, ours = network(), initialized(lambda: teacher_network(UNITS + 1))
    ours.terms(model, tuple(leaf.unsqueeze(0) for leaf in batch(0)))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no outer part": (lambda: parts(0.0), "validation_fraction=0.0: must lie between 0 and 1"),
    "no inner part": (lambda: parts(1.0), "validation_fraction=1.0: must lie between 0 and 1"),
    "not a number": (lambda: parts(math.nan), "validation_fraction=nan: must lie between 0 and 1"),
    "an empty part": (lambda: parts(0.01), "validation_fraction=0.01: leaves one part of the 10 examples empty"),
    "a batch above the part": (
        lambda: parts(0.5, 6),
        "batch_size=6: more than the 5 examples that train the student",
    ),
    "no inner step": (lambda: MetaLearning(lambda: None, 0), "inner_steps=0: must be at least 1"),
    "nobody judges": (lambda: MetaLearning(None, validation_fraction=0.0), "validation_fraction=0.0: must lie between"),
    "no real step": (lambda: MetaLearning(lambda: None, 1, 0), "student_steps=0: must be at least 1"),
    "a negative weight": (lambda: Teaching(-1.0), "teaching_weight=-1.0: must be a finite number, not below 0"),
    "a weight of NaN": (lambda: Teaching(math.nan), "teaching_weight=nan: must be a finite number, not below 0"),
    "an inner rate of 0": (lambda: SGD(0.0), "lr=0.0: must be a finite number above 0"),
    "a decay of 1": (lambda: Adam(0.1, 1.0), r"beta1=1.0: must lie in \[0, 1\)"),
    "a gate's scale": (lambda: GatedError(0.0), "scale=0.0: must be a finite number above 0"),
    "a layer that is not there": (
        lambda: initialized(layers=("9",)),
        "layers=9: the model has no such layer; there are 0, 1, 2",
    ),
    "targets of another shape": (wrong_shape, r"teacher: gives \(6, 6\) for a layer of the student that has \(6, 5\)"),
    "one target for two layers": (
        lambda: Teaching(1.0, layers=("0", "2"))([torch.ones(1, 1)] * 2, torch.ones(1, 1)),
        "teacher: gives Tensor; expected a tuple of 2, one a layer",
    ),
    "no gates": (lambda: GatedError()(torch.ones(1, 1), torch.ones(1, 1)), r"a gated loss needs a pair \(h\*, m\)"),
    "nothing to learn": (lambda: initialized(nn.Identity), "teacher: none of its parameters requires a gradient"),
    "labels of rows": (
        lambda: with_privileged(torch.ones(2, 1), torch.ones(2, 3)),
        r"labels \(2, 1\) and privileged \(2, 3\): expected \(examples,\) and \(examples, ...\) of the same number",
    ),
    "batches that do not divide a pass": (
        lambda: metrics_of(drawn_anew(make=examples), CONFIG.with_options(batch_size=9)),
        "batch_size: with a split drawn anew it has to divide every environment's examples",
    ),
    "nobody to judge": (
        lambda: metrics_of(drawn_anew(real=4)),
        "student_steps=4: with a split drawn anew: at most the 2 of a pass's 4 steps that do not judge",
    ),
    "other environments at each step": (
        lambda: metrics_of(job(), CONFIG.with_options(environments_per_step=1)),
        "--environments-per-step 1: the job's objective needs the same environments at each step",
    ),
    "an optimizer that cannot be unrolled": (
        lambda: metrics_of(job(), CONFIG.with_options(optimizer="temporal-and-mask")),
        "optimizer=TemporalAndMaskAdam: its steps cannot be unrolled; give adam or sgd",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_in_a_line(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises(InputError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_meta_loss_that_is_not_a_number_ends_the_run() -> None:
    given = job(rule=SGD(1e30), inner=6)
    with pytest.raises(NonFiniteGradientError, match="outer examples"):
        metrics_of(given)
