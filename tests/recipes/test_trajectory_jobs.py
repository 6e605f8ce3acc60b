"""Jobs on simulated trajectories: lazy reading, training with masks, labels read from rollouts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from concord.cli import main
from concord.environments import BatchStream
from concord.environments.sharded import ShardedData
from concord.errors import InputError
from concord.execution.preflight import preflight
from concord.space import Choice
from concord.training import ProcessContext, load_job, train
from concord.training.context import Silent
from concord_jobs.box2d.data import make_trajectories
from concord_jobs.box2d.trajectories import Trajectories, TrajectoryExamples
from concord_jobs.room_runner.job import RoomRunnerOptions
from concord_jobs.room_runner.simulator import RoomRunner

ROOMS = load_job("room-runner")
SMALL = {"size": 32, "trajectories": 4, "epochs": 1, "evaluations": 1, "kernels": 4}


@pytest.fixture(scope="module")
def made(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("Box2D")
    output = tmp_path_factory.mktemp("trajectories")
    counts: dict[str, Any] = {"trajectories": 5, "validation_trajectories": 3, "test_trajectories": 2, "tasks": 1}
    for perturbed in (False, True):
        options = RoomRunnerOptions(size=32, perturbed=perturbed, output=output, shard_size=5, **counts)
        make_trajectories(options, lambda _: None)
    return output


def test_examples_are_trajectories_padded_to_the_longest_requested(made: Path) -> None:
    trajectories = Trajectories(ShardedData(made / "data" / RoomRunner(size=32).folder, "room-runner"), "train")
    examples = TrajectoryExamples("standard", trajectories, 4)
    assert len(examples) == 4
    for asked in (slice(1, 3), torch.tensor([2, 0])):
        part = examples.take(asked)
        chosen = torch.arange(4)[asked].tolist()
        assert part["frames"].shape[1] == int(part["length"].max())
        for row, index in enumerate(chosen):
            frames, label = trajectories[index]
            assert torch.equal(part["frames"][row, : len(frames)], frames)
            assert int(part["label"][row]) == int(label)
    whole = examples.padded(examples.longest + 2)
    assert whole.take(slice(1, 3))["frames"].shape[1] == examples.longest + 2
    assert torch.equal(whole.take(slice(1, 3))["key"], examples.take(slice(1, 3))["key"])
    with pytest.raises(InputError, match="environment standard: it has 5 trajectories, not 6"):
        TrajectoryExamples("standard", trajectories, 6)


def test_room_runner_trains_with_and_without_skips_and_masked(made: Path) -> None:
    perturbed = made / "data" / RoomRunner(size=32, perturbed=True).folder
    ways: list[dict[str, Any]] = [
        {},
        {"skip": "fixed", "stride": 2},
        {"perturbed_dir": perturbed, "aggregator": "and-mask", "threshold": 0.6},
    ]
    evaluations = []
    for way in ways:
        config = ROOMS.job.config.with_options(output=made, **SMALL, **way)
        config.check()
        reported = preflight(ROOMS, config).reported
        metrics = train(ROOMS.job, config, ProcessContext(), Silent()).metrics
        assert {name for name in reported if "worst" not in name} <= set(metrics)
        assert 0 <= metrics["ood_soft_accuracy"] <= 1
        assert metrics["train_depth"] >= 2
        evaluations.append(metrics["model_evaluations"])
    assert evaluations[0] < evaluations[1]


def test_physics_change_at_an_epoch(made: Path) -> None:
    folders = {changed: made / "data" / RoomRunner(size=32, perturbed=changed).folder for changed in (True, False)}
    changed = {"epochs": 3, "switch_epoch": 1, "trajectories": 5, "lr_decay_steps": 0}
    config = ROOMS.job.config.with_options(output=made, **SMALL | changed)
    environments = ROOMS.job.environments(config)
    assert environments.train == ("standard",)
    stream = BatchStream(environments.load(environments.train), 2, seed=config.run.seed)
    splits = {changed: Trajectories(ShardedData(folder, "room-runner"), "train") for changed, folder in folders.items()}
    for step in range(9):  # of three steps an epoch, though five are no whole batches
        batch = stream.batch(step)
        there = [splits[step < 3][index][0] for index in range(5)]
        for frames, length in zip(batch["frames"][0], batch["length"][0].tolist(), strict=True):
            assert any(torch.equal(frames[:length], each) for each in there)
    metrics = train(ROOMS.job, config, ProcessContext(), Silent()).metrics
    assert {name for name in metrics if name.startswith("loss/train/")} == {"loss/train/standard"}


def test_a_run_draws_which_frames_were_matched_and_a_rollout(made: Path) -> None:
    config = ROOMS.job.config.with_options(output=made, **SMALL)
    outcome = train(ROOMS.job, config, ProcessContext(), Silent())
    assert ROOMS.job.figures is not None
    model = ROOMS.job.model(config).eval()
    drawn = ROOMS.job.figures(ROOMS.job, config, outcome, model)
    assert set(drawn) == {"sequence", "skips", "rollout"}
    true, predicted = drawn["rollout"]
    assert true.shape == predicted.shape
    assert true.shape[1:] == (3, 32, 32)
    validation = ROOMS.job.environments(config)["validation"].take(slice(0, 1))
    ends_with = validation["frames"][0, int(validation["length"][0]) - 1]
    assert torch.equal(true[-1], ends_with)


def test_the_rate_falls_by_steps() -> None:
    config = ROOMS.job.config.with_options(epochs=150)
    assert config.resolve().schedule.milestones == pytest.approx((15_000 / 37_500, 30_000 / 37_500))
    fewer = config.with_options(steps_per_update=3)  # 250 batches are 84 steps
    assert fewer.resolve().schedule.milestones == ()
    faster = fewer.with_options(lr_decay_steps=6300)
    assert faster.resolve().schedule.milestones == pytest.approx((0.5,))
    by_hand = config.with_options(lr_decay_steps=0, milestones=(0.25,))
    assert by_hand.resolve().schedule.milestones == (0.25,)
    assert "milestones" in config.resolve().unused()


@pytest.mark.parametrize("name", ["room-runner", "funnel-board"])
def test_the_studies_have_the_spaces_of_the_thesis(name: str) -> None:
    job = load_job(name).job
    sizes = {}
    for method, study in job.studies.items():
        choices = {option: entry.values for option, entry in study.space.entries.items() if isinstance(entry, Choice)}
        sizes[method] = math.prod(map(len, choices.values()))
        fixed = {option: entry for option, entry in study.space.entries.items() if not isinstance(entry, Choice)}
        (suggestion,) = study.suggestions  # tables A.1 and A.2
        assert suggestion.keys() == choices.keys()
        assert all(value in choices[option] for option, value in suggestion.items())
        for point in ({o: v[0] for o, v in choices.items()}, {o: v[-1] for o, v in choices.items()}):
            job.config.with_options(**fixed, **point).check()
    common = 3 * 3 * 2 * 3
    fixed_strides = {f"fixed-{stride}": common for stride in (1, 2, 3)}
    assert sizes == {"asi": common * 4 * 3, "asi-no-exploration": common * 4, **fixed_strides}


@pytest.mark.slow
def test_a_study_reads_what_is_not_in_memory_as_it_is_needed(
    ray_cluster: None, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    given = ["--method", "asi", "--trials", "1", "--architecture", "plain", "--output", str(made)]
    assert main(["tune", "room-runner", *small, *given, "--json"]) == 0
    said = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert (said["finished"], said["failed"], said["metric"]) == (1, 0, "validation_soft_accuracy")
    assert 0 <= said["best"]["metrics"]["validation_soft_accuracy"] <= 1


def read(output: Path, options: dict[str, Any]) -> None:
    config = ROOMS.job.config.with_options(output=output, **SMALL | options)
    config.check()
    assert ROOMS.job.environments(config)["standard"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 64}, "no data of room-runner; concord data room-runner makes them"),
        ({"data": Path("/nowhere")}, "no data of room-runner; concord data room-runner --size 32 makes them"),
        (
            {"perturbed_dir": Path("/nowhere")},
            "/nowhere: no data of room-runner; concord data room-runner --size 32 --perturbed makes them",
        ),
        ({"trajectories": 9}, "has 5 for training"),
        ({"trajectories": 0}, "--lr-decay-steps 15000: needs the number of a run's steps; give also --trajectories"),
        ({"perturbed": True, "perturbed_dir": Path("x")}, "--perturbed-dir x: with --perturbed there is no other"),
        ({"perturbed": True, "switch_epoch": 1}, "--switch-epoch 1: with --perturbed there is no other physics"),
        ({"switch_epoch": -1}, "--switch-epoch -1: must not be negative"),
        ({"switch_epoch": 1}, "--switch-epoch 1: must come before the last of the 1 epochs"),
        ({"environments_per_step": 1}, "--environments-per-step 1: --lr-decay-steps counts steps of all environments"),
        ({"lr_decay_steps": -1}, "--lr-decay-steps -1: must not be negative"),
        ({"held_out": 0.1}, "--held-out 0.1: there are trajectories for validation; give 0"),
        ({"kernels": 0}, "--kernels 0: must be at least 1"),
    ],
)
def test_wrong_options_are_one_line(made: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        read(made, options)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
