"""Adaptive skip intervals: the search is exact, the loop is the printed one, the data's place changes nothing."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from forked import run_group
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from recorded import Kept, without_time
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from concord.analysis.figures import save
from concord.analysis.trajectory_figures import moving_picture
from concord.dynamics import (
    CrossEntropy,
    Curriculum,
    PredictionMean,
    SkipConfig,
    SkipRisk,
    SquaredError,
    accuracies,
    as_float,
    best_match,
    rollout,
    rollout_depth,
    sequences,
    skip_objective,
    staircase,
    task_measures,
    unroll,
)
from concord.dynamics.skip_figures import aligned_sequences, skip_figures, timelines
from concord.dynamics.trajectory_draws import uniform
from concord.environments import Environments
from concord.errors import InputError
from concord.gradients import NonFiniteGradientError
from concord.models import DynamicsNetwork
from concord.training import Evaluation, Job, ProcessContext, Run, load_job, train
from concord.training.context import Silent
from concord_jobs.box2d.figures import accuracy_figure

TOY = load_job("skip-toy").job
SHAPE = (1, 4, 4)
Logits = Callable[[Tensor], Tensor]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Unflatten(1, SHAPE))


def examples(lengths: Sequence[int], seed: int = 0, name: str = "a") -> dict[str, Tensor]:
    random = np.random.default_rng(seed)
    return sequences(name, [random.integers(0, 256, (length, *SHAPE), dtype=np.uint8) for length in lengths])


def of_numbers(model: Logits, values: Sequence[float], horizon: int, **options: Any) -> tuple[list[int], float]:
    """Where the predictions of a sequence of numbers are matched, and their mean loss by squared errors."""
    frames = torch.tensor(values)[None, :, None]
    found = unroll(model, frames, torch.tensor([len(values)]), SkipConfig(horizon), loss=SquaredError(), **options)
    return found.times[0, 1:].tolist(), float(found.losses.sum() / found.counts.sum())


# --- the loop


@pytest.mark.parametrize(
    ("values", "horizon", "matched", "loss"),
    [
        ([2, 3, 4, 8, 10, 16], 3, [2, 3, 5], 0.0),
        ([0.5, 0.7, 0.9, 1, 1.9, 1.96, 2, 3.5, 4], 3, [3, 6, 8], 0.0),
        ([4, 5, 7, 8, 15, 16, 31], 2, [2, 4, 6], 1.0),
    ],
)
def test_what_doubling_matches_is_known(values: list[float], horizon: int, matched: list[int], loss: float) -> None:
    assert of_numbers(lambda x: 2 * x, [float(each) for each in values], horizon) == (matched, loss)


def reference(
    model: Logits, frames: Tensor, skips: SkipConfig, mu: float, epsilon: float, draws: Tensor
) -> tuple[list[int], Tensor]:
    """The algorithm as it is printed, of one sequence of frames in [0, 1], with one loss after the other."""

    def cost(logits: Tensor, target: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(logits[0], target)

    t, x, last, times = 0, frames[0], len(frames) - 1, [0]
    total = torch.zeros(())
    while t + (skips.stride or 1) <= last:
        logits = model(x[None])
        explore, where, feed = draws[len(times) - 1].tolist()
        bound = min(t + skips.horizon, last)
        if skips.stride:
            t = t + skips.stride
        elif explore < mu:
            t = t + 1 + int(where * (bound - t))
        else:
            t = min(range(t + 1, bound + 1), key=lambda s: float(cost(logits.detach(), frames[s])))
        times.append(t)
        total = total + cost(logits, frames[t])
        x = frames[t] if feed < epsilon else logits[0].sigmoid()
    return times, total


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(5, 14), min_size=1, max_size=4),
    st.integers(1, 16),
    st.sampled_from([None, None, 1, 2, 3]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.integers(0, 1000),
)
def test_the_loop_is_the_printed_algorithm_in_losses_jumps_and_gradients(
    lengths: list[int], horizon: int, stride: int | None, mu: float, epsilon: float, seed: int
) -> None:
    batch, model, skips = examples(lengths, seed), network(seed), SkipConfig(horizon, stride)
    draws = uniform(seed, batch["key"], 3, max(lengths), 3)
    found = unroll(model, batch["frames"], batch["length"], skips, exploration=mu, sampling=epsilon, draws=draws)
    expected = [
        reference(model, batch["frames"][row, :length].float() / 255, skips, mu, epsilon, draws[row])
        for row, length in enumerate(lengths)
    ]
    for row, (times, _) in enumerate(expected):
        assert found.times[row][found.times[row] >= 0].tolist() == times
    assert_close(found.losses, torch.stack([total for _, total in expected]), rtol=1e-5, atol=1e-6)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(found.losses.sum(), parameters)
    theirs = torch.autograd.grad(sum(total for _, total in expected), parameters)
    assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    if stride is None:
        jumps = found.times.diff(dim=1)[found.times[:, 1:] >= 0]
        assert bool(((jumps >= 1) & (jumps <= horizon)).all())
        last = torch.tensor(lengths) - 1
        assert torch.equal(found.times.amax(1), last)
        assert bool(((found.counts >= -(-last // horizon)) & (found.counts <= last)).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 10_000), st.booleans())
def test_the_product_finds_what_one_loss_after_the_other_finds(
    trajectories: int, horizon: int, seed: int, as_bytes: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(0, 256, (trajectories, 14, *SHAPE), generator=generator).byte()
    frames = frames if as_bytes else frames.float() / 255
    logits = 3 * torch.randn(trajectories, *SHAPE, generator=generator)
    first = torch.randint(0, 13, (trajectories,), generator=generator)
    width = (14 - first).clamp(max=horizon)
    found = best_match(CrossEntropy(), logits, frames, torch.arange(trajectories), first, width)
    targets = frames if not as_bytes else frames.float() / 255
    for row in range(trajectories):
        costs = [
            float(binary_cross_entropy_with_logits(logits[row].double(), targets[row, at].double()))
            for at in range(int(first[row]), int(first[row] + width[row]))
        ]
        assert costs[int(found[row])] == pytest.approx(min(costs), abs=1e-7)


@pytest.mark.parametrize("shape", [SHAPE, (3, 32, 32), (3, 64, 64), (3, 126, 75)])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_of_equal_frames_the_nearest_is_matched(shape: tuple[int, ...], as_bytes: bool) -> None:
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        one, other = torch.randint(0, 256, (2, *shape), generator=generator).byte()
        frames = torch.stack([one, *[other] * 10, one, *[other] * 9])[None]
        frames = frames if as_bytes else frames.float() / 255
        before, logits = frames.clone(), torch.randn(1, *shape, generator=generator)
        zero = torch.tensor([0])
        assert int(best_match(CrossEntropy(), logits, frames, zero, zero, torch.tensor([21]))) in (0, 1)
        CrossEntropy().costs(logits, frames)
        assert torch.equal(frames, before)


def test_near_ties_of_bright_frames_are_told_apart() -> None:
    """A pixel that differs by one of 256 steps, in a frame of the size of the funnel board's."""
    frames = torch.full((1, 3, 3, 75, 126), 255, dtype=torch.uint8)
    frames[0, 0, 0, 0, 0], frames[0, 2, 0, 0, 0] = 253, 254
    logits = torch.full((1, 3, 75, 126), 8.0)
    one = torch.tensor([0])
    assert int(best_match(CrossEntropy(), logits, frames, one, one, torch.tensor([3]))) == 1
    frames[0, 1, 0, 0, 0] = 252
    assert int(best_match(CrossEntropy(), logits, frames, one, one, torch.tensor([3]))) == 2


@pytest.mark.parametrize("exploration", [0.0, 0.5, 1.0])
def test_a_horizon_of_1_is_a_fixed_stride_of_1_to_the_last_bit(exploration: float) -> None:
    batch, model = examples([9, 5, 7]), network()
    results = []
    for skips in (SkipConfig(1), SkipConfig(21, 1)):
        draws = uniform(0, batch["key"], 0, 9, 3)
        found = unroll(
            model, batch["frames"], batch["length"], skips, exploration=exploration, sampling=0.5, draws=draws
        )
        results.append([found.losses, found.times, *torch.autograd.grad(found.losses.sum(), model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_last_piece_shorter_than_the_stride_is_left_out() -> None:
    batch = examples([8, 7, 4])
    found = unroll(network(), batch["frames"], batch["length"], SkipConfig(9, 3))
    assert found.times.tolist() == [[0, 3, 6], [0, 3, 6], [0, 3, -1]]


def test_frames_that_were_not_chosen_get_no_gradient_and_chosen_ones_do() -> None:
    frames = torch.rand(2, 8, *SHAPE, requires_grad=True)
    found = unroll(network(), frames, torch.tensor([8, 6]), SkipConfig(4), sampling=0.0)
    gradient = torch.autograd.grad(found.losses.sum(), frames)[0].abs().flatten(2).sum(2)
    used = torch.zeros(2, 8, dtype=torch.bool)
    for row, times in enumerate(found.times):
        used[row, times[times >= 0]] = True
    assert torch.equal(gradient > 0, used)


def test_ground_truth_cuts_the_gradient_and_feedback_does_not() -> None:
    """The last loss alone: with ε = 1 it depends on the frame before, and on no earlier one."""
    for sampling, reached in ((1.0, False), (0.0, True)):
        frames = torch.rand(1, 4, *SHAPE, requires_grad=True)
        found = unroll(network(), frames, torch.tensor([4]), SkipConfig(9, 1), sampling=sampling)
        first = torch.autograd.grad(found.losses.sum(), frames)[0][0, 0]
        alone = unroll(network(), frames[:, :2], torch.tensor([2]), SkipConfig(9, 1), sampling=sampling)
        only = torch.autograd.grad(alone.losses.sum(), frames)[0][0, 0]
        # To rounding: a batch of three predictions is not computed as one of one is.
        assert torch.allclose(first, only, rtol=1e-5, atol=1e-8) is not reached


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_a_saturated_prediction_costs_a_finite_loss(logit: float) -> None:
    batch, weight = examples([5]), torch.tensor(1.0, requires_grad=True)
    found = unroll(lambda x: 0 * x + logit * weight, batch["frames"], batch["length"], SkipConfig(3))
    assert math.isfinite(float(found.losses.detach().sum()))
    assert bool(torch.isfinite(torch.autograd.grad(found.losses.sum(), weight)[0]))


def test_exploration_alone_draws_evenly_from_what_is_left_of_the_horizon() -> None:
    batch = {name: leaf.expand(4000, *leaf.shape[1:]) for name, leaf in examples([8]).items()}
    draws = uniform(0, torch.arange(4000), 0, 8, 3)
    found = unroll(network(), batch["frames"], batch["length"], SkipConfig(5), exploration=1.0, draws=draws)
    counts = torch.bincount(found.times[:, 1], minlength=6)[1:].double()
    assert float((counts / 800 - 1).abs().max()) < 0.15
    near = found.times[found.times[:, 1] == 5][:, 2]  # two frames are left
    assert float((near == 6).double().mean()) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(("sampling", "batches"), [(1.0, [9]), (0.0, [3, 3, 2, 1])])
def test_pieces_of_a_fixed_stride_are_predicted_side_by_side(sampling: float, batches: list[int]) -> None:
    """With ε = 1 all predictions are one batch; with ε = 0 each follows from the one before."""
    batch, model, seen = examples([9, 5, 7]), network(), []
    model.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    unroll(model, batch["frames"], batch["length"], SkipConfig(21, 2), sampling=sampling)
    assert seen == batches


def test_a_finished_trajectory_is_evaluated_no_more() -> None:
    seen: list[int] = []
    batch, model = examples([10, 4, 2]), network()

    def counting(frames: Tensor) -> Tensor:
        seen.append(len(frames))
        logits: Tensor = model(frames)
        return logits

    found = unroll(counting, batch["frames"], batch["length"], SkipConfig(9, 1))
    assert seen == [3, 2, 2, 1, 1, 1, 1, 1, 1]
    assert sum(seen) == int(found.counts.sum()) == 9 + 3 + 1


def test_perfect_binary_predictions_are_matched_and_gray_frames_need_not() -> None:
    """Cross-entropy is linear in its target, so the extreme of a segment wins, not the frame that was predicted."""
    low, high = torch.zeros(1, 1, *SHAPE), torch.ones(1, 1, *SHAPE)
    binary = torch.cat([high, low, (torch.rand(1, 1, *SHAPE) > 0.5).float()], 1)
    one = torch.tensor([0])
    for at in range(3):
        logits = 20 * (2 * binary[:, at] - 1)
        assert int(best_match(CrossEntropy(), logits, binary, one, one, torch.tensor([3]))) == at
    gray = torch.cat([0.7 * high, high], 1)
    assert int(best_match(CrossEntropy(), torch.logit(gray[:, 0]), gray, one, one, torch.tensor([2]))) == 1


# --- what changes nothing


def risk_of(batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    model = network()
    total, count = SkipRisk(SkipConfig(5), Curriculum(40, 40), **options)(model, batch, 10)
    return (total, count, *torch.autograd.grad(total / count, list(model.parameters())))


def test_padding_and_the_order_of_a_batch_change_nothing() -> None:
    batch = examples([9, 5, 7, 3])
    expected = risk_of(batch)
    shuffled = {name: leaf[[2, 0, 3, 1]] for name, leaf in batch.items()}
    assert_close(risk_of(shuffled), expected, rtol=1e-5, atol=1e-6)
    padding = torch.full((4, 6, *SHAPE), 255, dtype=torch.uint8)
    padded = batch | {"frames": torch.cat([batch["frames"], padding], 1)}
    assert all(torch.equal(one, other) for one, other in zip(risk_of(padded), expected, strict=True))
    assert not torch.equal(risk_of(batch, seed=1)[0], expected[0])


def test_draws_depend_on_seed_sequence_and_step_and_are_even() -> None:
    keys = torch.arange(2000)
    drawn = uniform(0, keys, 7, 5, 3)
    assert torch.equal(uniform(0, keys[[5, 3]], 7, 2, 3), drawn[[5, 3], :2])
    assert drawn.unique().numel() == drawn.numel()
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    for other in (uniform(1, keys, 7, 5, 3), uniform(0, keys, 8, 5, 3), uniform(0, keys + 2000, 7, 5, 3)):
        together = torch.corrcoef(torch.stack([drawn.flatten(), other.flatten()]))[0, 1]
        assert abs(float(together)) < 0.02


SMALL = {"examples": 6, "epochs": 4, "evaluations": 2, "batch_size": 4, "passed": 3, "exploration_steps": 6}


def trained(rank: int, world_size: int, folder: Path, aggregator: str) -> None:
    config = TOY.config.with_options(**SMALL, aggregator=aggregator, threshold=0.6, workers=world_size)
    outcome = train(TOY, config, ProcessContext(rank, world_size), Silent())
    if rank == 0:
        torch.save(outcome.metrics, folder / f"{aggregator}-{world_size}.pt")


@pytest.mark.parametrize("aggregator", ["mean", "and-mask"])
def test_one_worker_and_two_train_the_same(tmp_path: Path, aggregator: str) -> None:
    trained(0, 1, tmp_path, aggregator)
    run_group(trained, 2, tmp_path, tmp_path, aggregator)
    one, two = (torch.load(tmp_path / f"{aggregator}-{workers}.pt") for workers in (1, 2))
    for name in ("train_loss", "validation_loss", "model_evaluations", "validation_mean_skip"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name


def test_a_run_resumed_amid_the_curriculum_ends_as_one_undisturbed(tmp_path: Path) -> None:
    config = TOY.config.with_options(**SMALL, checkpoints=4)
    kept = Kept(tmp_path)
    whole = train(TOY, config, ProcessContext(), kept)
    resumed = train(TOY, config, ProcessContext(), Silent(), resume_from=kept.checkpoints[1])
    assert without_time(whole.metrics) == without_time(resumed.metrics)
    assert whole.metrics["model_evaluations"] > 0


def test_the_mean_over_predictions_weighs_environments_by_them() -> None:
    batch = {name: torch.stack([leaf[:2], leaf[2:]]) for name, leaf in examples([9, 8, 3, 2]).items()}
    risk, model = SkipRisk(SkipConfig(1), Curriculum(0, 0)), network()
    both = [risk(model, {name: leaf[each] for name, leaf in batch.items()}, 0) for each in range(2)]
    pooled, separate = skip_objective(risk, "mean"), skip_objective(risk, "and-mask")
    assert isinstance(pooled, PredictionMean)
    sums, counts = (torch.stack(each) for each in zip(*both, strict=True))
    assert_close(pooled(model, batch), sums.sum() / counts.sum())
    assert_close(separate(model, batch), (sums / counts).mean())
    assert_close(pooled.losses(pooled.terms(model, batch)[0].view(2, 2)), sums / counts)


# --- curriculum, rollout, network


def test_the_curriculum_is_the_published_one() -> None:
    curriculum = Curriculum(7500, 20_000)
    assert [curriculum.exploration(step) for step in (0, 3750, 7500, 9000)] == [1.0, 0.5, 0.0, 0.0]
    assert [curriculum.sampling(step) for step in (0, 4000, 12_000)] == [1.0, 0.5, 0.25]
    assert Curriculum(0, 0).exploration(0) == Curriculum(0, 0).sampling(0) == 0.0
    assert staircase(15_000, 37_500) == (0.4, 0.8)
    assert staircase(0, 100) == ()


def test_a_rollout_goes_on_from_what_was_predicted() -> None:
    model, first = network(), examples([3])["frames"][:, 0]
    found = rollout(model, first, 3)
    assert found.shape == (1, 3, *SHAPE)
    assert_close(found[:, 2], model(found[:, 1]).sigmoid())
    doubled = rollout(lambda x: 2 * x, torch.ones(2, 1), 4, loss=SquaredError())
    assert doubled[0, :, 0].tolist() == [2, 4, 8, 16]


def test_the_depth_of_a_rollout_is_1_more_than_what_matching_needed() -> None:
    assert rollout_depth(torch.full((10,), 7)) == 8
    assert rollout_depth(torch.tensor([3, 5, 4, 4])) == 5
    assert rollout_depth(torch.tensor([3, 5, 6, 4, 9])) == 10  # means 4, 5 and 9


def test_accuracy_is_the_share_of_the_true_class_and_of_the_largest() -> None:
    shares = torch.tensor([[3.0, 1.0], [1.0, 1.0], [0.2, 0.6]])
    assert accuracies(shares, torch.tensor([0, 1, 0])) == pytest.approx(((0.75 + 0.5 + 0.25) / 3, 0.5))


@pytest.mark.parametrize(
    ("architecture", "parameters"), [("plain", 292_179), ("dilated", 292_179), ("strided", 236_883)]
)
def test_the_network_is_the_one_of_the_appendix(architecture: Any, parameters: int) -> None:
    model = DynamicsNetwork(3, 48, architecture)
    assert sum(each.numel() for each in model.parameters()) == parameters
    small = DynamicsNetwork(3, 4, architecture)
    for size in ((15, 22), (16, 16)):
        frames = torch.randint(0, 256, (2, 3, *size)).byte()
        assert small(frames).shape == frames.shape
        assert_close(small(frames), small(frames.float() / 255))


def test_what_reaches_a_pixel_is_wider_with_a_dilated_or_strided_layer() -> None:
    reach = {}
    for architecture in ("plain", "dilated", "strided"):
        model = DynamicsNetwork(1, 4, architecture)  # type: ignore[arg-type]
        for parameter in model.parameters():
            nn.init.constant_(parameter, 1e-3)
        frames = torch.rand(1, 1, 61, 61, requires_grad=True)
        gradient = torch.autograd.grad(model(frames)[0, 0, 30, 30], frames)[0][0, 0]
        reach[architecture] = int((gradient[30] != 0).sum())
    assert reach["plain"] == 1 + 4 * 4 + 6
    assert reach["dilated"] == 1 + 4 * 4 + 12
    assert reach["strided"] > reach["plain"]


# --- evaluation and figures


def test_what_is_read_from_rollouts_is_what_the_model_predicts() -> None:
    """f moves a bright pixel to the right by two, and data by one a frame: one prediction for every second frame."""
    frames = torch.zeros(4, 9, 1, 1, 10, dtype=torch.uint8)
    frames[:, torch.arange(9), 0, 0, torch.arange(9)] = 255
    batch = {
        "frames": frames,
        "length": torch.full((4,), 9),
        "key": torch.arange(4),
        "label": torch.tensor([1, 1, 1, 0]),
    }

    def moved(states: Tensor) -> Tensor:
        return 40 * nn.functional.pad(states, (2, 0))[..., :-2] - 20

    def read_label(found: Tensor, first: Tensor) -> Tensor:
        assert first.shape == (4, 1, 1, 10)
        right = found[..., 5:].sum((1, 2, 3, 4))
        return torch.stack([found.sum((1, 2, 3, 4)) - right, right], 1)

    measured = task_measures(
        moved,  # type: ignore[arg-type]
        lambda: [batch],
        SkipConfig(5),
        read_label,
        lambda found: found.flatten(2).amax(2) > 0.5,
    )
    assert measured["mean_skip"] == 2
    assert measured["predictions"] == 4
    assert measured["depth"] == 5
    assert measured["frames_seen"] == 4  # at the fifth it has left
    assert measured["soft_accuracy"] == pytest.approx(0.5, abs=1e-3)  # 6 and 8 are right of the middle, 2 and 4 are not


def test_figures_are_drawn_and_say_what_does_not_fit(tmp_path: Path) -> None:
    batch = examples([9, 6])
    found = unroll(network(), batch["frames"], batch["length"], SkipConfig(4))
    times = found.times[0][found.times[0] > 0].tolist()
    aligned = aligned_sequences(batch["frames"][0], torch.rand(len(times), *SHAPE), times)
    assert len(aligned.axes) == 18
    assert save(aligned, tmp_path / "aligned.png").stat().st_size > 1000
    (axes,) = timelines(found.times, batch["length"]).axes
    assert [len(each.get_offsets()) for each in axes.collections[1::2]] == (found.counts + 1).tolist()
    moving = moving_picture(torch.rand(2, 7, *SHAPE), tmp_path / "rollout.gif", scale=3)
    with Image.open(moving) as picture:
        assert (getattr(picture, "n_frames", 1), picture.size) == (7, (24, 12))
    history = [Evaluation(epoch, epoch, {"score": epoch / 4, "model_evaluations": 9.0 * epoch}) for epoch in (1, 2, 4)]
    runs = {"asi": [Run.of(history, seed, {}) for seed in range(3)]}
    by_epoch, by_evaluations = accuracy_figure(runs, "score").axes
    assert by_epoch.lines[0].get_xdata().tolist() == [1, 2, 4]
    assert by_evaluations.lines[0].get_xdata().tolist() == [9, 18, 36]
    with pytest.raises(InputError, match="metric loss: none of the runs has it"):
        accuracy_figure(runs, "loss")
    with pytest.raises(InputError, match="expected 1 of a sequence of 9 frames"):
        aligned_sequences(batch["frames"][0], torch.rand(1, *SHAPE), [9])
    with pytest.raises(InputError, match="1 or 3 channels"):
        moving_picture(torch.rand(3, 2, 4, 4), tmp_path / "none.gif")


def test_states_of_any_range_are_followed_by_squared_errors() -> None:
    """Doubling, see above: as a risk of a batch, and as what is reported."""
    values = torch.tensor([2.0, 3, 4, 8, 10, 16])
    padded = torch.cat([values, torch.full((2,), torch.nan)])  # what is beyond the length is never looked at
    batch = sequences("a", [padded[:, None]], [6], longest=8, label=[0], bounded=False)
    batch["frames"][0, 6:] = torch.nan
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, 2.0)
    total, count = SkipRisk(SkipConfig(3), Curriculum(sampling_steps=0), loss=SquaredError())(network, batch, 0)
    assert (float(total.detach()), float(count)) == (0.0, 3.0)

    def share(rolled: Tensor, first: Tensor) -> Tensor:
        """Of class 0 where the first predictions are 4, 8 and 16."""
        right = (rolled[:, :3, 0] == torch.tensor([4.0, 8, 16])).all(1).float()
        return torch.stack([right, 1 - right], 1)

    seen = lambda rolled: rolled[..., 0] > 0  # noqa: E731
    found = task_measures(network.eval(), lambda: [batch], SkipConfig(3), share, seen, loss=SquaredError())
    assert (found["soft_accuracy"], found["predictions"]) == (1.0, 3.0)


@pytest.mark.parametrize("part", ["risk", "objective"])
def test_the_figures_of_a_job_match_and_feed_back_by_its_loss(part: str) -> None:
    """f halves, and the frames 1/2, 1/4, 1/8 of the first one are among the others."""
    frames = torch.tensor([240, 180, 120, 90, 60, 30]).byte().view(6, 1, 1, 1)
    config = TOY.config.with_options(horizon=3, sampling_steps=0)
    risk = config.skips.risk(0, SquaredError())
    parts: dict[str, Any] = {"risk": risk} if part == "risk" else {"objective": lambda _: skip_objective(risk, "mean")}
    job = Job(
        environments=lambda _: Environments(lambda name: sequences(name, [frames], [6]), ["a"]),
        model=lambda _: nn.Linear(1, 1, bias=False),
        **parts,
    )
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    shown = skip_figures(job, config, None, model)["rollout"]
    assert isinstance(shown, Tensor)
    assert shown.flatten(1).tolist() == [[120, 60, 30]] * 2


# --- the toy


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_toy_is_learned_with_one_prediction_for_every_exit(precision: str) -> None:
    config = TOY.config.with_options(epochs=70, evaluations=1, precision=precision)
    metrics = train(TOY, config, ProcessContext(), Silent()).metrics
    assert metrics["ood_right_skips"] > 0.99
    assert metrics["ood_right_rollout"] == 1.0
    assert metrics["ood_predictions"] == pytest.approx(8, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(21, 29))
def test_the_toy_is_learned_with_any_seed(seed: int) -> None:
    metrics = train(TOY, TOY.config.with_options(seed=seed, evaluations=1), ProcessContext(), Silent()).metrics
    assert metrics["ood_right_skips"] > 0.99


@pytest.mark.parametrize("numbers", [False, True])
def test_the_toy_draws_what_was_matched(numbers: bool) -> None:
    """The frames that were matched above, and the predictions below, whether frames are bytes or numbers in [0, 1]."""
    config, outcome = TOY.config, Run.of(())
    frames = [255 * (torch.rand(6, 1, 4, 4) < 0.5).byte() for _ in range(3)]
    given = [as_float(each) for each in frames] if numbers else frames
    job = dataclasses.replace(
        TOY, environments=lambda _: Environments(lambda name: sequences(name, given), ["a", "b"], ["v"])
    )
    model = nn.Conv2d(1, 1, 1)
    nn.init.constant_(model.weight, -60.0)
    nn.init.constant_(cast(Tensor, model.bias), 30.0)  # each prediction is the negative of the frame before
    assert job.figures is not None
    drawn = job.figures(job, config, outcome, model.eval())
    assert set(drawn) == {"sequence", "skips", "rollout"}
    (true, predicted) = cast(Tensor, drawn["rollout"])
    matched = [[torch.equal(each, frame) for frame in frames[0]].index(True) for each in true]
    assert matched == sorted(set(matched))
    assert matched[0] > 0
    assert torch.equal(predicted[0], 255 - frames[0][0])


# --- wrong input


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: SkipConfig(0), "horizon=0: must be at least 1"),
    (lambda: SkipConfig(5, 0), "stride=0: must be at least 1"),
    (lambda: Curriculum(-1), "exploration_steps=-1: must not be negative"),
    (lambda: staircase(-1, 10), "lr_decay_steps=-1: must not be negative"),
    (lambda: examples([4, 1]), "environment a, sequence 1: 1 frames of an array (1, 1, 4, 4); it needs at least 2"),
    (lambda: examples([]), "environment a: it is empty"),
    (lambda: sequences("a", [np.zeros((3, 1, 4, 4)), np.zeros((3, 2, 4, 4))]), "sequence 1: a frame is (2, 4, 4)"),
    (lambda: sequences("a", [np.full((3, 1, 4, 4), 1.5)]), "sequence 0: its frames hold values outside of [0, 1]"),
    (lambda: sequences("a", [np.full((3, 1, 4, 4), np.nan)]), "sequence 0: its frames hold values outside of [0, 1]"),
    (lambda: sequences("a", [np.zeros((3, 1, 4, 4), np.int64)]), "frames of type int64; expected uint8, or float"),
    (lambda: sequences("a", [np.zeros((3, 4))], longest=2), "longest=2, but it has a sequence of 3 frames"),
    (lambda: sequences("a", np.zeros((2, 3, 4)), [3]), "1 lengths of 2 sequences"),
    (lambda: sequences("a", np.zeros((2, 3, 4)), label=[1]), "environment a: label (1,) of 2 sequences"),
    (lambda: sequences("a", [np.full((3, 4), np.inf)], bounded=False), "hold values that are not finite"),
    (lambda: risk_of({"frames": torch.zeros(1)}), "batch: has no length, key"),
    (lambda: risk_of(examples([3]) | {"frames": torch.full((1, 3, *SHAPE), 2.0)}), "values outside of [0, 1]"),
    (lambda: DynamicsNetwork(3, 4)(torch.zeros(2, 1, 8, 8)), "frames (2, 1, 8, 8): expected (frames, 3, height"),
    (lambda: DynamicsNetwork(3, 0), "kernels=0: must be at least 1"),
    (lambda: DynamicsNetwork(3, 4, "deep"), "architecture=deep: must be one of plain"),  # type: ignore[arg-type]
    (lambda: rollout(network(), torch.zeros(1, *SHAPE), 0), "depth=0: must be at least 1"),
    (lambda: of_numbers(lambda x: x[:, :0], [1, 2], 1), "model: gives (1, 0) for frames (1, 1); they must be alike"),
    (lambda: unroll(network(), torch.zeros(1, 3, *SHAPE), torch.tensor([1]), SkipConfig()), "it has 1 frames; it"),
    (lambda: unroll(network(), torch.zeros(1, 3, *SHAPE), torch.tensor([3]), SkipConfig(5, 3)), "4 with --stride 3"),
    (lambda: unroll(network(), torch.zeros(1, 3, *SHAPE), torch.tensor([4]), SkipConfig()), "4 is more than the 3"),
    (lambda: unroll(network(), torch.zeros(0, 3, *SHAPE), torch.zeros(0), SkipConfig()), "at least one"),
    (
        lambda: unroll(
            network(), torch.zeros(1, 9, *SHAPE), torch.tensor([9]), SkipConfig(), draws=torch.rand(1, 2, 3)
        ),
        "draws (1, 2, 3): expected (1, 8, 3), or of more predictions",
    ),
    (lambda: accuracies(torch.zeros(2, 3), torch.zeros(3)), "do not fit each other"),
]  # fmt: skip


@pytest.mark.parametrize(("do", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_wrong_input_is_one_line(do: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        do()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"horizon": 0}, "--horizon 0: must be at least 1"),
        ({"exploration_steps": -1}, "--exploration-steps -1: must not be negative"),
        ({"sampling_steps": -1}, "--sampling-steps -1: must not be negative"),
        ({"stride": 2}, "--stride 2: --skip adaptive finds its own; give --skip fixed"),
        ({"skip": "fixed", "stride": 0}, "--stride 0: must be at least 1"),
        ({"brightness": (0.5, 2.0)}, "--brightness 0.5 2.0: give different probabilities"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=r"^--") as raised:
        TOY.config.with_options(**options).check()
    assert said in str(raised.value)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_its_sequence() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, frames: Tensor) -> Tensor:
            bad = (frames.flatten(1).mean(1) > 0.99)[:, None, None, None]
            return frames * self.weight + torch.where(bad, torch.inf, 0.0) * 0

    bright = [np.zeros((4, *SHAPE), np.uint8), np.full((4, *SHAPE), 255, np.uint8), np.zeros((4, *SHAPE), np.uint8)]
    job = dataclasses.replace(
        TOY,
        environments=lambda _: Environments(lambda name: sequences(name, bright), ["a"]),
        model=lambda _: Broken(),
        evaluation=None,
        criterion=None,
    )
    config = job.config.with_options(epochs=1, batch_size=3)
    with (
        pytest.warns(UserWarning, match="step 0: the loss of sequence 1 of its environment is not finite"),
        pytest.raises(NonFiniteGradientError, match="a"),
    ):
        train(job, config, ProcessContext(), Silent())


def test_a_job_needs_a_loss_a_risk_or_an_objective() -> None:
    with pytest.raises(InputError, match="give a loss"):
        Job(TOY.environments, TOY.model)
    config = TOY.config.with_options(horizon=3)
    assert TOY.risk_of(config).skips == SkipConfig(3)
    wrong = dataclasses.replace(TOY, evaluation=lambda _: {"score": 1.0})
    with pytest.raises(InputError, match="evaluation gave dict, expected EnvironmentEvaluation"):
        wrong.evaluation_of(config)
