"""Distillation's tasks: the Game of Life, returns of a simulator, their teachers, and the jobs that train on them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given as given_examples
from hypothesis import settings, strategies
from hypothesis.extra import numpy as arrays
from recorded import without_time
from torch import nn
from torch.testing import assert_close

from concord.cli import main
from concord.distillation import (
    SGD,
    AuxiliaryPrediction,
    Distillation,
    GatedError,
    Student,
    Teaching,
    meta_gradient,
    of_labels,
    privileged_of,
)
from concord.environments import Environments
from concord.errors import InputError
from concord.gradients.risk import as_risk
from concord.objectives import ERM
from concord.space import Choice
from concord.training import Job, ProcessContext, load_job, train
from concord.training.build import build_model
from concord.training.context import Silent
from concord_jobs.distill_life.frame_attention import FrameAttention
from concord_jobs.distill_life.life import boards_figure, following, random_trajectories
from concord_jobs.distill_mujoco.data import ReturnOptions, examples_of, make_returns, returns_of
from concord_jobs.distill_mujoco.dynamics import DynamicsModel, trajectory_error, transition_error
from concord_jobs.distill_mujoco.simulator import (
    HORIZON,
    SIZES,
    MujocoTrajectories,
    ReturnBins,
    Simulator,
    Standardization,
    bin_values,
    disturbed,
    make_environment,
    simulate,
    squared_error_of_bins,
)
from concord_jobs.distill_mujoco.teacher import TrajectoryTeacher
from concord_jobs.distill_xor.job import SignOracle, XorConfig, student, teacher

# --- Life


def board(*rows: str) -> Any:
    return np.array([[cell == "#" for cell in row] for row in rows], np.uint8)


@pytest.mark.parametrize("name", ["distill-xor", "distill-logits"])
@pytest.mark.parametrize("seed", range(3))
def test_the_students_first_weights_know_nothing_of_the_task(name: str, seed: int) -> None:
    """Drawn by the same generator they would be rows of A."""
    job = load_job(name).job
    config = job.config.with_options(seed=seed, examples=1000)
    inputs, targets = (each.double() for each in job.environments(config).load(["train"])[0].data)
    numbers = targets[:, 1:3] * targets[:, 3:5] if name == "distill-xor" else targets[:, 1:5]  # A x
    mixing = torch.linalg.lstsq(inputs, numbers).solution.T
    assert_close(inputs @ mixing.T, numbers, rtol=0, atol=1e-4)
    first = next(iter(build_model(job, config).parameters())).detach().double()
    alike = torch.nn.functional.normalize(first) @ torch.nn.functional.normalize(mixing).T
    assert alike.abs().max() < 0.8


@given_examples(strategies.integers(1, 130), strategies.integers(1, 40))
def test_the_students_first_layer_and_its_teachers_have_the_widths_asked_for(taught: int, units: int) -> None:
    config = XorConfig(dimensions=5, taught_units=taught, teacher_units=units)
    assert student(config)[0].out_features == taught
    taught_by_net = teacher(config)
    assert [layer.out_features for layer in taught_by_net if hasattr(layer, "out_features")] == [units, units, taught]

    signs, hidden = torch.tensor([[-1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
    (said,) = SignOracle(taught)(torch.cat([signs, signs * hidden], 1)).tolist()
    assert len(said) == taught
    assert said == sorted(said), "h_1 to the first half of the units, h_2 to the second"
    assert abs(said.count(2.0) - said.count(3.0)) <= 1


def test_a_block_stays() -> None:
    block = board("....", ".##.", ".##.", "....")
    assert np.array_equal(following(block), block)


def test_a_blinker_blinks() -> None:
    upright = board(".....", "..#..", "..#..", "..#..", ".....")
    assert np.array_equal(following(upright), upright.T)
    assert np.array_equal(following(following(upright)), upright)


def test_a_glider_has_moved_down_and_right_after_four_steps() -> None:
    glider = board(".#......", "..#.....", "###.....", *["........"] * 5)
    there = glider
    for _ in range(4):
        there = following(there)
    assert np.array_equal(there, np.roll(glider, (1, 1), (0, 1)))


def test_the_border_is_dead() -> None:
    assert np.array_equal(following(board("##", "##")), board("##", "##"))
    assert following(board("###")).tolist() == [[0, 1, 0]]


@settings(max_examples=25, deadline=None)
@given_examples(
    arrays.arrays(np.uint8, (17, 17), elements=strategies.integers(0, 1)), strategies.integers(0, 2**32 - 1)
)
def test_the_label_depends_on_the_middle_seven_by_seven_alone(first: Any, seed: int) -> None:
    other = np.random.default_rng(seed).integers(0, 2, (17, 17)).astype(np.uint8)
    other[5:12, 5:12] = first[5:12, 5:12]
    for _ in range(3):
        first, other = following(first), following(other)
    assert first[8, 8] == other[8, 8]


def test_random_boards_are_those_of_the_thesis() -> None:
    states = random_trajectories(20_000, 0)
    assert states.shape == (20_000, 4, 17, 17)
    assert states[:, 0].mean() == pytest.approx(0.4, abs=0.001)
    assert np.array_equal(states[:50, 2], following(states[:50, 1]))
    # .3018: who always says dead is right in .698.
    assert states[:, 3, 8, 8].mean() == pytest.approx(0.3018, abs=4 * (0.21 / 20_000) ** 0.5)
    assert np.array_equal(random_trajectories(10, 0), states[:10])


def test_the_figure_of_the_boards_shows_each_state_and_frames_the_label() -> None:
    states = random_trajectories(2, 0)
    axes = boards_figure(states).axes
    for place, board in zip(axes, states.reshape(8, 17, 17), strict=True):
        assert np.array_equal(place.images[0].get_array(), board)
    (frame,) = axes[3].patches
    assert frame.get_bbox().bounds == (7.5, 7.5, 1, 1)


# --- a teacher that points at frames


def test_attention_is_equations_4_2_and_4_3() -> None:
    teacher = FrameAttention(3, 2, 4)
    frames = torch.rand(5, 3, 7, 6)
    first, second = teacher(frames)
    assert first.shape == (5, 4, 7, 6)
    phi = teacher.phi.detach()
    for example, layer, kind in ((0, 0, 0), (4, 1, 3)):
        weights = phi[:, layer, kind].exp() / phi[:, layer, kind].exp().sum()
        expected = sum(weights[t] * frames[example, t] for t in range(3))
        assert_close((first, second)[layer][example, kind], expected)


def test_a_teacher_that_points_says_the_frame_it_points_at() -> None:
    frames = torch.rand(2, 3, 4, 4)
    for said, frame in zip(FrameAttention.pointing([1, 2, 0], 3, 5)(frames), (1, 2, 0), strict=True):
        assert_close(said, frames[:, frame : frame + 1].expand(-1, 5, -1, -1))


def test_the_oracle_of_life_says_the_boards_in_their_order() -> None:
    given = load_job("distill-life").job
    config = given.config.with_options(teacher="oracle", examples=20, filters=2)
    boards, targets = given.environments(config)["train"].data
    objective = given.objective(config)
    objective.begin(given.model(config), 1, 1)
    state = boards[:, 0].numpy().astype(np.uint8)
    for said in objective.module(objective.privileged((boards, targets))):
        state = following(state)
        assert np.array_equal(said.numpy(), np.stack([state, state], 1))
    assert np.array_equal(targets[:, 0].numpy(), state[:, 8, 8])


def assert_objective(objective: Any, expected: type, learns: bool) -> None:
    assert (type(objective), getattr(objective, "meta", None) is not None) == (expected, learns)


FEW_BOARDS: dict[str, Any] = {"examples": 40, "filters": 2, "epochs": 1, "evaluations": 1, "batch_size": 8}


def with_environments_of(job: Job[Any], load: Callable[[str], Any]) -> Job[Any]:
    environments = Environments(load, ["train"], ["validation"], ["test"])
    return dataclasses.replace(job, environments=lambda _: environments)


def test_life_trains_differently_with_every_teacher_and_split() -> None:
    given, losses = load_job("distill-life").job, set()
    few = FEW_BOARDS | {"validation_fraction": 0.2}
    ways: list[tuple[type, bool, dict[str, Any]]] = [
        (Distillation, True, {"teacher": "meta", "student_steps": 2}),
        (Distillation, True, {"resample_split": True, "student_steps": 1}),
        (Distillation, False, {"teacher": "fixed"}),
        (Distillation, False, {"teacher": "oracle"}),
        (ERM, False, {"teacher": "none"}),
        (AuxiliaryPrediction, False, {"teacher": "none", "auxiliary_weight": 1.0}),
    ]
    for expected, learns, options in ways:
        config = given.config.with_options(unrolled_steps=2, **few, **options)
        config.check()
        assert_objective(given.objective(config), expected, learns)
        made = given.environments(config)
        small = with_environments_of(given, lambda name, made=made: [leaf[:200] for leaf in made[name].data])
        metrics = train(small, config, ProcessContext(), Silent()).metrics
        assert 0 <= metrics["ood_accuracy"] <= 1
        losses.add(metrics["ood_loss"])
    assert len(losses) == len(ways)


# --- returns of a simulator


@pytest.fixture(scope="module")
def mujoco() -> None:
    pytest.importorskip("mujoco")


@pytest.mark.usefixtures("mujoco")
@pytest.mark.parametrize("simulator", get_args(Simulator))
def test_states_and_rewards_are_those_of_the_environment_step_by_step(simulator: Any) -> None:
    made = simulate(simulator, "test", 3, 5, 3)
    environment, _ = make_environment(simulator)
    assert (made.state.shape[1], made.actions.shape[2]) == SIZES[simulator]
    for example in range(3):
        drawn = np.random.default_rng([3, 1, 5 + example])
        environment.np_random = drawn
        environment.reset()
        before = int(drawn.integers(10, 31))
        for step, action in enumerate(drawn.integers(-1, 2, (before + HORIZON, SIZES[simulator][1])), -before):
            observed, reward, *_ = environment.step(action.astype(float))
            if step == -1:
                assert np.array_equal(made.state[example], observed.astype(np.float32))
            elif step >= 0:
                assert np.array_equal(made.actions[example, step], action)
                assert np.array_equal(made.states[example, step], observed.astype(np.float32))
                assert made.rewards[example, step] == reward
    assert_close(made.returns, made.rewards.sum(1))


@pytest.mark.usefixtures("mujoco")
def test_an_example_depends_on_its_number_alone() -> None:
    whole, part = simulate("Swimmer", "train", 0, 0, 6), simulate("Swimmer", "train", 0, 4, 2)
    for name, array in vars(part).items():
        assert np.array_equal(vars(whole)[name][4:], array)
    others = simulate("Swimmer", "test", 0, 4, 2), simulate("Swimmer", "train", 1, 4, 2)
    assert not any(np.array_equal(other.actions, part.actions) for other in others)


def test_each_bin_has_as_many_training_examples() -> None:
    returns = np.random.default_rng(0).standard_normal(4000)
    counts = np.bincount(ReturnBins(returns).labels(returns), minlength=32)
    assert set(counts.tolist()) <= {124, 125, 126}


def test_places_are_linear_in_between_and_cut_outside() -> None:
    bins = ReturnBins(np.array([0.0, 1.0, 3.0]), 4)
    assert bins.places(np.array([0.5, 2.0, -9.0, 9.0])).tolist() == [0.25, 0.75, 0.0, 1.0]
    assert bins.labels(np.array([-np.inf, 0.9, 2.0, np.inf])).tolist() == [0, 1, 3, 3]


def test_equal_returns_share_a_bin_and_so_do_all_of_them() -> None:
    assert ReturnBins(np.array([1.0, 2.0, 2.0, 3.0]), 4).places(np.array([2.0])).tolist() == [0.5]
    for constant in (np.full(10, 7.0), np.array([7.0])):
        assert set(ReturnBins(constant).labels(np.array([7.0, 6.0, 8.0])).tolist()) == {16}


def test_always_saying_the_same_errs_by_a_twelfth() -> None:
    labels = torch.arange(32)
    assert squared_error_of_bins(torch.zeros(32, 32), labels).mean().item() == pytest.approx(1 / 12, abs=2e-4)
    right = squared_error_of_bins(100.0 * torch.eye(32), labels)
    assert_close(right, torch.zeros(32), atol=1e-9, rtol=0)
    assert bin_values(32)[[0, -1]].tolist() == [1 / 64, 63 / 64]


@settings(max_examples=25, deadline=None)
@given_examples(arrays.arrays(np.float64, (6, 4, 3), elements=strategies.floats(-100, 100)))
def test_standardized_data_have_mean_0_and_deviation_1_or_0(data: Any) -> None:
    made = Standardization.of(data)(data).reshape(-1, 3).astype(np.float64)
    varies = data.reshape(-1, 3).std(0) > 1e-3
    assert_close(made.mean(0)[varies], np.zeros(varies.sum()), atol=1e-4, rtol=0)
    assert_close(made.std(0)[varies], np.ones(varies.sum()), atol=1e-4, rtol=0)
    assert np.isfinite(made).all()


def test_disturbed_frames_are_shuffled_within_an_example_or_noise() -> None:
    frames = np.arange(4 * 16 * 2, dtype=np.float32).reshape(4, 16, 2)
    shuffled = disturbed(frames, 0, permute=True)
    assert np.array_equal(np.sort(shuffled, 1), frames)
    orders = shuffled[:, :, 0] - 32 * np.arange(4)[:, None]
    assert len({tuple(order) for order in orders.tolist()}) == 4
    noisy = disturbed(frames, 0, noise=3)
    assert np.array_equal(noisy[:, :13], frames[:, :13])
    assert np.abs(noisy[:, 13:]).max() < 6
    assert np.array_equal(disturbed(frames, 0), frames)


# --- a teacher of trajectories


def small_trajectory_teacher(**options: Any) -> TrajectoryTeacher:
    return TrajectoryTeacher(4, 3, [5, 6], channels=(8, 7), wide=9, **options).double()


def test_a_normalizing_teacher_is_asked_once_and_agrees_with_each_batch() -> None:
    """The same meta-gradient as of a teacher that is asked batch by batch, which running statistics make it be."""
    torch.manual_seed(0)
    teacher = small_trajectory_teacher()
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    loss = of_labels(lambda outputs, labels: (outputs.sum(1) - labels).square().mean())
    student = Student(model, as_risk(loss), Teaching(2.0, GatedError(10.0, 1.0), ("0", "2")))

    def batch(seed: int) -> Any:
        drawn = torch.Generator().manual_seed(seed)
        return torch.randn(6, 2, generator=drawn).double(), torch.randn(6, 13, generator=drawn).double()

    def found() -> Any:
        batches = [batch(0), batch(1), batch(2)]
        return meta_gradient(student, teacher, batches, batch(9), SGD(0.1, 0.5), privileged=privileged_of).gradients

    calls: list[int] = []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    once = found()
    assert len(calls) == 1
    for module in teacher.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.track_running_stats = True  # without buffers it still takes the batch's statistics
    assert_close(found(), once)
    assert len(calls) == 4


def test_a_teacher_in_bfloat16_says_nearly_what_it_says_in_float32() -> None:
    torch.manual_seed(0)
    teacher, frames = small_trajectory_teacher().float(), torch.randn(20, 12)
    exact = teacher(frames)
    teacher.autocast = torch.bfloat16
    assert [each.shape for each, _ in exact] == [(20, 5), (20, 6)]
    for pairs in zip(teacher(frames), exact, strict=True):
        for near, said in zip(*pairs, strict=True):
            assert near.dtype == torch.float32
            assert_close(near, said, atol=0.05, rtol=0.05)


# --- the data and the job


SMALL: dict[str, Any] = {"simulator": "Swimmer", "examples": 100, "test_examples": 30, "validation_examples": 1010}


def quiet(_: str) -> None: ...


@pytest.fixture(scope="module")
def data(mujoco: None, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("returns") / "data"
    assert make_returns(ReturnOptions(data=folder, tasks=2, **SMALL), quiet)["files_made"] == 4
    return folder


def test_files_hold_the_examples_in_their_order(data: Path) -> None:
    there = examples_of(returns_of(data, Path(), "Swimmer"), "validation")
    assert len(there.rewards) == 1010
    for first in (0, 998):
        expected = simulate("Swimmer", "validation", 0, first, 4)
        for name, array in vars(expected).items():
            assert np.array_equal(vars(there)[name][first : first + 4], array)


def options_of(folder: Path, **options: Any) -> Any:
    few = {"epochs": 1, "evaluations": 1, "unrolled_steps": 2, "student_steps": 2, "batch_size": 20}
    given = {"data": folder, "simulator": "Swimmer"} | few | options
    return load_job("distill-mujoco").job.config.with_options(**given)


def test_returns_are_learned_differently_with_every_teacher_and_ablation(data: Path) -> None:
    given, errors = load_job("distill-mujoco").job, set()
    ways: list[tuple[type, bool, dict[str, Any]]] = [
        (ERM, False, {"teacher": "none"}),
        (Distillation, False, {"teacher": "fixed", "permute_time": True}),
        (Distillation, True, {"noise_frames": 16}),
        (Distillation, True, {"resample_split": True, "student_steps": 1}),
        (AuxiliaryPrediction, False, {"teacher": "none", "auxiliary_weight": 1.0, "noise_frames": 8}),
        (ERM, False, {"teacher": "none", "dynamics": "trajectory"}),
        (ERM, False, {"teacher": "none", "dynamics": "transition"}),
    ]
    for expected, learns, options in ways:
        config = options_of(data, **options)
        config.check()
        assert_objective(given.objective(config), expected, learns)
        metrics = train(given, config, ProcessContext(), Silent()).metrics
        assert 0 < metrics["ood_squared_error"] < 1
        errors.add(metrics["ood_squared_error"])
    assert len(errors) == len(ways)


def test_the_student_s_first_five_layers_are_taught(data: Path) -> None:
    given, config = load_job("distill-mujoco").job, options_of(data)
    objective, model = given.objective(config), given.model(config)
    objective.begin(model, 1, 1)
    inputs, targets = given.environments(config)["train"].data
    said = objective.module(privileged_of((inputs[:8], targets[:8])))
    assert [tuple(each.shape for each in pair) for pair in said] == [((8, 128), (8, 128))] * 5
    assert len(inputs) == 70  # the others judge
    assert model(inputs[:2]).shape == (2, 32)


def test_the_last_hidden_layer_predicts_all_states_and_rewards(data: Path) -> None:
    given, config = load_job("distill-mujoco").job, options_of(data, teacher="none", auxiliary_weight=2.0)
    objective, model = given.objective(config), given.model(config)
    objective.begin(model, 1, 1)
    inputs, targets = (each[:8] for each in given.environments(config)["train"].data)
    predicted = objective.module(model[:-1](inputs))
    found, _ = objective.terms(model, (inputs[None], targets[None]))
    expected = given.loss(model(inputs), targets) + 2 * (predicted - targets[:, 1:]).square().mean()
    assert predicted.shape == (8, HORIZON * (SIZES["Swimmer"][0] + 1))
    assert_close(found[0], expected)


class LinearWorld(torch.nn.Module):
    """A world of 3 observations and 2 actions whose next state and reward are linear in state and action."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        self.weights = nn.Parameter(made / torch.linalg.matrix_norm(made, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weights


def in_a_linear_world(seed: int, examples: int = 200) -> tuple[MujocoTrajectories, torch.Tensor, torch.Tensor]:
    """Trajectories of a linear world, x, and x*, followed one example and one step at a time."""
    drawn, world = np.random.default_rng(seed), LinearWorld(seed).double()
    state = torch.from_numpy(drawn.standard_normal((examples, 3)))
    actions = torch.from_numpy(drawn.integers(-1, 2, (examples, HORIZON, 2)))
    frames = torch.zeros(examples, HORIZON, 4, dtype=torch.float64)
    for example in range(examples):
        there = state[example]
        for step in range(HORIZON):
            frames[example, step] = world(torch.cat([there, actions[example, step]])).detach()
            there = frames[example, step, :3]
    made = (state.numpy(), actions.numpy().astype(np.int8), frames[..., :3].numpy(), frames[..., 3].numpy())
    inputs = torch.cat([state, actions.flatten(1)], 1)
    return MujocoTrajectories(*made), inputs, frames


@pytest.mark.parametrize("bins", [2, 7, 32])
def test_the_true_dynamics_predict_the_quantile_of_every_return(bins: int) -> None:
    there, inputs, _ = in_a_linear_world(bins)
    reward = Standardization.of(there.rewards[..., None])
    world = LinearWorld(bins).double()

    class Standardized(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            states, rewards = world(given).split([3, 1], 1)
            return torch.cat([states, (rewards - reward.mean[0]) / reward.deviation[0]], 1)

    logits = DynamicsModel.of(Standardized(), there, bins).double()(inputs)
    assert logits.shape == (200, bins)
    values = bin_values(bins)
    found = (logits.softmax(1) @ torch.from_numpy(values)).detach()
    quantiles = torch.from_numpy(ReturnBins(there.returns, bins).places(there.returns))
    assert_close(found, quantiles.clamp(values[0], values[-1]), atol=1e-5, rtol=0)  # the knots are float32
    labels = torch.from_numpy(ReturnBins(there.returns, bins).labels(there.returns))
    assert squared_error_of_bins(logits, labels).max() <= (0.5 / bins) ** 2 + 1e-5


def test_the_two_errors_of_dynamics_follow_their_own_states_or_the_true_ones() -> None:
    _, inputs, frames = in_a_linear_world(3, examples=5)
    targets = torch.cat([torch.zeros(5, 1), frames.flatten(1)], 1)

    def model(seed: int) -> DynamicsModel:
        return DynamicsModel(LinearWorld(seed), 3, torch.arange(3.0), torch.tensor([0, 0.5, 1]), 32).double()

    for error in (trajectory_error, transition_error):
        assert error(model(3), (inputs, targets), 0).item() < 1e-24

    other, own, true = model(4), [], []
    for example in range(5):
        state, actions = inputs[example, :3], inputs[example, 3:].view(HORIZON, 2)
        before = state
        for step in range(HORIZON):
            predicted = other.network(torch.cat([state, actions[step]]))
            own.append((predicted - frames[example, step]).square())
            true.append((other.network(torch.cat([before, actions[step]])) - frames[example, step]).square())
            state, before = predicted[:3], frames[example, step, :3]
    assert_close(trajectory_error(other, (inputs, targets), 0), torch.stack(own).mean())
    assert_close(transition_error(other, (inputs, targets), 0), torch.stack(true).mean())


@pytest.mark.parametrize("job", ["distill-xor", "distill-logits", "distill-life", "distill-mujoco"])
def test_an_option_that_nothing_looks_at_makes_no_other_run(job: str) -> None:
    """Runs from before --auxiliary-weight are found, and x* is disturbed for teacher and auxiliary prediction."""
    alone = load_job(job).job.config.with_options(teacher="none")
    of_meta = {"auxiliary_weight", "teaching_weight", "resample_split", "validation_fraction", "unrolled_steps"}
    assert of_meta | {"student_steps", "meta_lr"} <= alone.resolve().unused()
    assert "auxiliary_weight" not in alone.with_options(auxiliary_weight=1.0).resolve().unused()
    assert "teaching_weight" not in alone.with_options(teacher="fixed").resolve().unused()
    if job == "distill-mujoco":
        disturbs = {"permute_time", "noise_frames"}
        assert disturbs <= alone.resolve().unused()
        assert not disturbs & alone.with_options(auxiliary_weight=1.0).resolve().unused()
        assert {"meta_beta1", "unrolled_lr", "gate_offset", "dynamics"} <= alone.resolve().unused()
        assert not (disturbs | {"dynamics"}) & alone.with_options(dynamics="transition").resolve().unused()
    if job == "distill-life":
        assert {"taught_every", "meta_momentum"} <= alone.resolve().unused()


@pytest.mark.parametrize("job", ["distill-life", "distill-mujoco"])
def test_what_is_privileged_is_not_known_and_not_read_at_test(job: str, data: Path) -> None:
    given = load_job(job).job
    life = FEW_BOARDS | {"unrolled_steps": 2, "student_steps": 2}
    config = given.config.with_options(**life) if job == "distill-life" else options_of(data)

    def metrics(changed: Callable[[Any], Any]) -> dict[str, float]:
        def load(name: str) -> Any:
            inputs, targets = (leaf[:200] for leaf in made[name].data)
            return inputs, targets if name == "train" else changed(targets)

        made = given.environments(config)
        assert not made["test"].data[1][:, 1:].any()
        assert made["train"].data[1][:, 1:].any()
        other = with_environments_of(given, load)
        return without_time(train(other, config, ProcessContext(), Silent()).metrics)

    nonsense = metrics(lambda targets: torch.cat([targets[:, :1], torch.full_like(targets[:, 1:], 1e9)], 1))
    assert nonsense == metrics(lambda targets: targets)


# --- what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train distill-mujoco --noise-frames 17", "--noise-frames 17: must lie in [0, 16]"),
        ("train distill-mujoco --unrolled-lr 0", "--unrolled-lr 0.0: must be a finite number"),
        ("train distill-mujoco --gate-offset nan", "--gate-offset nan: must be a finite number"),
        ("train distill-mujoco --meta-beta1 1", "--meta-beta1 1.0: must lie in"),
        ("train distill-mujoco --validation-fraction 0", "--validation-fraction 0.0: must lie"),
        ("train distill-mujoco --unrolled-steps 0", "--unrolled-steps 0: must be at least 1"),
        ("train distill-mujoco --teacher oracle", "--teacher"),
        (
            "train distill-mujoco --auxiliary-weight 1",
            "--auxiliary-weight 1.0: --teacher meta has x* already; give --teacher none",
        ),
        (
            "train distill-mujoco --dynamics transition",
            "--dynamics transition: predicts x* itself; give --teacher none, without --auxiliary-weight",
        ),
        (
            "train distill-mujoco --teacher none --dynamics trajectory --auxiliary-weight 1",
            "--dynamics trajectory: predicts x* itself",
        ),
        ("train distill-mujoco --teaching-weight nan", "must be a finite number, not below 0"),
        ("train distill-mujoco", "no data of distill-mujoco; concord data distill-mujoco makes them"),
        ("data distill-mujoco --examples 0", "--examples 0: must be at least 1"),
        ("data distill-mujoco --seed -1", "--seed -1: must not be negative"),
        ("data distill-mujoco --simulator Ant", "--simulator"),
        ("train distill-life --taught-every 2", "--taught-every 2: must be 1, 3 or 9"),
        (
            "train distill-life --teacher oracle --taught-every 1",
            "--taught-every 1: the oracle teaches every third layer",
        ),
        ("train distill-life --filters 0", "--filters 0: must be at least 1"),
        ("train distill-life --examples 20 --batch-size 19", "--batch-size 19: more than the 18 examples"),
        ("train distill-life --meta-momentum 1", "--meta-momentum 1.0: must lie in"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line_and_leaves_nothing(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_data_of_another_simulator_are_refused(data: Path) -> None:
    with pytest.raises(InputError, match=r"simulator=Hopper: the data in .* are of Swimmer"):
        load_job("distill-mujoco").job.environments(options_of(data, simulator="Hopper"))


@pytest.mark.parametrize("name", ["distill-life", "distill-mujoco"])
def test_every_corner_of_the_studied_spaces_is_a_configuration(name: str) -> None:
    job = load_job(name).job
    for method, study in job.studies.items():
        assert study.selection is None  # so that validation environments judge
        for end in (0, -1):
            point = {each.name: edges(each.domain)[end] for each in study.space.varied()}
            job.config.with_options(**point, **study.space.fixed(point)).check()
        assert ("meta" in study.space.fixed({}).values()) == (method == "ldt")


def edges(domain: Any) -> tuple[Any, ...]:
    return domain.values if isinstance(domain, Choice) else (domain.low, domain.high)
