"""From the gradient to the next weights, against the update rules in a few lines."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from concord.errors import InputError
from concord.objectives import PenaltyWeight, VREx
from concord.training.optimization import Optimization
from concord.training.options import TrainConfig

STEPS = 8


def config(**options: Any) -> TrainConfig:
    return TrainConfig().with_options(**{"lr": 0.1, "milestones": (), **options}).resolve()


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (4,))]


def gradients() -> list[list[Tensor]]:
    """Of every step; some components are masked, as the rules leave them."""
    generator = torch.Generator().manual_seed(2)
    made = [[torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights()] for _ in range(STEPS)]
    for step in made:
        step[0][0, 1] = step[1][2] = 0
    return made


def run(options: TrainConfig, start: list[Tensor], steps: list[list[Tensor]]) -> tuple[list[Tensor], list[float]]:
    parameters = [nn.Parameter(weight.clone()) for weight in start]
    optimization = Optimization(parameters, options.resolve(), len(steps))
    rates = []
    for index, step in enumerate(steps):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        rates.append(optimization.lr)
        optimization.step(index)
    return [parameter.detach() for parameter in parameters], rates


def reference(options: TrainConfig, start: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    """The update rules, on one vector of all weights."""
    options = options.resolve()
    w = torch.cat([weight.flatten() for weight in start])
    first, second, velocity = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w)
    for index, step in enumerate(steps):
        passed = sum(index >= round(at * len(steps)) for at in options.schedule.milestones)
        lr = options.optimizer.lr * options.schedule.decay**passed * options.schedule.decay_per_step**index
        g = torch.cat([gradient.flatten() for gradient in step])
        if options.optimizer.clip > 0:
            g = g * min(1.0, options.optimizer.clip / (float(g.norm()) + 1e-6))
        if options.optimizer.regularization == "coupled":
            g = g + options.optimizer.l1 * w.sign() + options.optimizer.l2 * w
        if options.optimizer.optimizer == "adam":
            first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
            move = (first / (1 - 0.9 ** (index + 1))) / ((second / (1 - 0.999 ** (index + 1))).sqrt() + 1e-8)
        else:
            velocity = 0.9 * velocity + g
            move = velocity
        w = w - lr * move
        if options.optimizer.regularization == "decoupled":
            w = w - lr * options.optimizer.l2 * w
            w = w.sign() * (w.abs() - lr * options.optimizer.l1).clamp(min=0)
    sizes = [weight.numel() for weight in start]
    return [part.view(weight.shape) for part, weight in zip(w.split(sizes), start, strict=True)]


PENALTIES = [{}, {"l1": 0.05}, {"l2": 0.3}, {"l1": 0.05, "l2": 0.3}]
EXTRAS = [
    {},
    {"clip": 0.5},
    {"clip": 100.0},
    {"milestones": (0.25, 0.5), "decay": 0.3},
    {"milestones": (0.5,), "decay_per_step": 0.8},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("regularization", ["coupled", "decoupled"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_weights_follow_the_update_rule(optimizer: Any, regularization: Any, penalty: Any, extra: Any) -> None:
    options = config(optimizer=optimizer, regularization=regularization, **penalty, **extra)
    found, _ = run(options, weights(), gradients())
    assert_close(found, reference(options, weights(), gradients()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("warmup", [0.0, 0.5])
@pytest.mark.parametrize(("schedule", "decay_per_step"), [("cosine", 1.0), ("cosine", 0.9), ("constant", 1.0)])
def test_the_rate_is_the_schedules_times_the_warm_ups(schedule: Any, decay_per_step: float, warmup: float) -> None:
    options = config(schedule=schedule, warmup=warmup, milestones=(0.5,), decay_per_step=decay_per_step)
    _, rates = run(options, weights(), gradients())
    falling = [0.5 * (1 + math.cos(math.pi * step / STEPS)) if schedule == "cosine" else 1.0 for step in range(STEPS)]
    rising = [min(1.0, (step + 1) / (warmup * STEPS)) if warmup else 1.0 for step in range(STEPS)]
    expected = [0.1 * falling[step] * rising[step] * decay_per_step**step for step in range(STEPS)]
    assert rates == pytest.approx(expected)


def test_a_decay_at_every_step_goes_on_from_where_a_checkpoint_was_written() -> None:
    options = config(lr=1.0, milestones=(0.5,), decay=0.5, decay_per_step=0.9)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    before = Optimization([parameter], options.resolve(), STEPS)
    rates = []
    for step in range(STEPS):
        if step == 5:
            after = Optimization([parameter], options.resolve(), STEPS)
            after.load_state_dict(before.state_dict())
            before = after
        rates.append(before.lr)
        before.step(step)
    assert rates == pytest.approx([0.9**step * (0.5 if step >= STEPS // 2 else 1.0) for step in range(STEPS)])


def test_a_schedule_without_it_has_the_checkpoints_that_it_always_had() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert Optimization(parameters, config().resolve(), STEPS).state_dict().keys() == {"optimizer", "schedule"}
    kept = Optimization(parameters, config(decay_per_step=0.9).resolve(), STEPS).state_dict()
    assert kept.keys() == {"optimizer", "schedule", "step_schedule"}


def test_options_make_a_difference() -> None:
    """The reference shares no code with the product, but an option that both ignored would go unseen."""
    results = {
        (optimizer, regularization, str(penalty), str(extra)): tuple(
            run(config(optimizer=optimizer, regularization=regularization, **penalty, **extra), weights(), gradients())[
                0
            ][0]
            .flatten()
            .tolist()
        )
        for optimizer in ("adam", "sgd")
        for regularization in ("coupled", "decoupled")
        for penalty in PENALTIES[1:]
        for extra in (EXTRAS[0], EXTRAS[1], *EXTRAS[3:])
    }
    assert len(set(results.values())) == len(results)


def still(count: int, steps: int) -> list[list[Tensor]]:
    return [[torch.zeros(count, dtype=torch.float64)] for _ in range(steps)]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_decoupled_l1_moves_a_weight_to_zero_and_stops_there(optimizer: Any) -> None:
    start = [torch.tensor([0.025, -0.025, 1.0, 0.0], dtype=torch.float64)]
    options = config(optimizer=optimizer, l1=0.1)  # 0.01 a step
    (after_two,), _ = run(options, start, still(4, 2))
    assert_close(after_two, torch.tensor([0.005, -0.005, 0.98, 0.0], dtype=torch.float64))
    (after_ten,), _ = run(options, start, still(4, 10))
    assert_close(after_ten, torch.tensor([0.0, 0.0, 0.9, 0.0], dtype=torch.float64))
    assert bool((after_ten[[0, 1, 3]] == 0).all())


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_decoupled_l2_shrinks_by_the_learning_rate_times_the_coefficient(optimizer: Any) -> None:
    start = [torch.tensor([1.0, -2.0], dtype=torch.float64)]
    (after,), _ = run(config(optimizer=optimizer, l2=0.5), start, still(2, 3))
    assert_close(after, start[0] * 0.95**3)


def test_coupled_penalty_moves_a_masked_weight_by_a_full_adam_step() -> None:
    """Why decoupled is the default: the penalty is the only gradient of a masked weight, and Adam scales it up."""
    start = [torch.tensor([1.0], dtype=torch.float64)]
    (coupled,), _ = run(config(l2=1e-5, regularization="coupled"), start, still(1, 1))
    (decoupled,), _ = run(config(l2=1e-5), start, still(1, 1))
    assert float(start[0] - coupled) == pytest.approx(0.1, rel=1e-2)
    assert float(start[0] - decoupled) == pytest.approx(1e-6, rel=1e-6)


def test_without_gradient_or_penalty_weights_stay() -> None:
    start = [torch.tensor([1.0, -2.0])]
    for optimizer in ("adam", "sgd"):
        (after,), _ = run(config(optimizer=optimizer), start, [[torch.zeros(2)]] * 3)
        assert_close(after, start[0], rtol=0, atol=0)


def test_clip_bounds_the_norm_over_all_parameters_before_the_penalty() -> None:
    start = [torch.tensor([0.0]), torch.tensor([10.0])]
    options = config(optimizer="sgd", clip=1.0, l2=0.1, regularization="coupled")
    after, _ = run(options, start, [[torch.tensor([3.0]), torch.tensor([4.0])]])
    assert_close(after, [torch.tensor([-0.1 * 0.6]), torch.tensor([10 - 0.1 * (0.8 + 1.0)])], rtol=1e-5, atol=1e-6)


def test_learning_rate_falls_at_the_milestones() -> None:
    """B.3: by a factor of 10 halfway through, and again at three quarters."""
    options = TrainConfig().with_options(lr=0.01)
    _, rates = run(options, [torch.zeros(2)], [[torch.ones(2)]] * 20)
    assert rates == pytest.approx([1e-2] * 10 + [1e-3] * 5 + [1e-4] * 5)
    _, rates = run(config(milestones=(0.5, 0.52)), [torch.zeros(2)], [[torch.ones(2)]] * 4)  # the same step twice
    assert rates == pytest.approx([0.1, 0.1, 1e-3, 1e-3])


@pytest.mark.parametrize("optimizer", ["adam", "temporal-and-mask"])
@pytest.mark.parametrize(
    ("options", "beta1"),
    [
        ({}, 0.9),
        ({"environment_momentum": 0.8}, 0.0),  # the gradients are averages over steps already
        ({"environment_momentum": 0.8, "beta1": 0.5}, 0.5),
        ({"beta1": 0.5}, 0.5),
        # no gradient of an environment is averaged: the objective has one of all
        ({"environment_momentum": 0.8, "objective": "vrex", "aggregator": "mean"}, 0.9),
    ],
    ids=str,
)
def test_gradients_are_averaged_over_steps_once(options: dict[str, Any], beta1: float, optimizer: str) -> None:
    resolved = config(optimizer=optimizer, **options).resolve()
    made = Optimization([nn.Parameter(torch.zeros(2))], resolved, STEPS)
    assert made.optimizer.param_groups[0]["betas"][0] == beta1
    assert resolved.optimizer.beta1 == beta1


def test_a_coupled_penalty_is_divided_like_the_objective() -> None:
    options = config(lr=1.0, l2=0.1, optimizer="sgd", momentum=0.0, regularization="coupled")
    objective = VREx(nn.functional.cross_entropy, PenaltyWeight(50.0, warmup=1))
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimization = Optimization([parameter], options.resolve(), 2, objective)
    parameter.grad = torch.zeros(2, dtype=torch.float64)
    for step, expected in enumerate((0.9, 0.9 * (1 - 0.1 / 50))):
        parameter.grad.zero_()
        optimization.step(step)
        assert parameter.tolist() == pytest.approx([expected, expected])


def test_adamw_is_pytorchs() -> None:
    options = config(optimizer="adamw", weight_decay=0.3, milestones=(0.5,), decay=0.5)
    found, _ = run(options, weights(), gradients())
    expected = [nn.Parameter(weight) for weight in weights()]
    optimizer = torch.optim.AdamW(expected, lr=0.1, weight_decay=0.3)
    for index, step in enumerate(gradients()):
        optimizer.param_groups[0]["lr"] = 0.1 if index < STEPS // 2 else 0.05
        for parameter, gradient in zip(expected, step, strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert_close(found, [parameter.detach() for parameter in expected], rtol=1e-12, atol=1e-12)
    assert torch.optim.AdamW(expected).defaults["weight_decay"] == config().optimizer.weight_decay


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "temporal-and-mask"])
def test_each_group_is_trained_as_if_with_its_options_alone(optimizer: Any) -> None:
    shared = {"optimizer": optimizer, "l2": 0.3, "l1": 0.05, "schedule": "cosine", "warmup": 0.5}
    options = config(**shared)
    slow = config(**{**shared, "lr": 0.01, "weight_decay": 0.0})
    parameters = [nn.Parameter(weight) for weight in weights()]
    decay = {"weight_decay": 0.0} if optimizer == "adamw" else {}
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01, **decay}]
    optimization = Optimization(groups, options, STEPS)
    for index, step in enumerate(gradients()):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimization.step(index)
    for place, alone in enumerate((options, slow)):
        expected, _ = run(alone, weights()[place : place + 1], [step[place : place + 1] for step in gradients()])
        assert_close(parameters[place].detach(), expected[0], rtol=1e-12, atol=1e-12)


def test_a_group_with_an_option_that_the_optimizer_lacks_is_refused() -> None:
    groups: list[dict[str, Any]] = [{"params": [nn.Parameter(torch.ones(2))], "learning_rate": 1.0}]
    with pytest.raises(
        InputError, match=r"parameter_groups: learning_rate: --optimizer sgd has no such option; .* lr,"
    ):
        Optimization(groups, config(optimizer="sgd"), STEPS)
