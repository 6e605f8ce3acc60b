"""Room runner and funnel board: the same trajectories in every process and file, and labels read from frames."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sharded import write as write_shards
from torch.utils.data import DataLoader

from concord.cli import main
from concord.environments.sharded import SPLITS, RowGroupData, ShardedData
from concord.errors import InputError
from concord.training import load_job
from concord_jobs.box2d.data import make_trajectories
from concord_jobs.box2d.trajectories import Trajectories, TrajectoryTask
from concord_jobs.box2d.trajectory_choice import TrajectoryChoice
from concord_jobs.funnel_board.simulator import FunnelBoard, sample_course
from concord_jobs.room_runner.job import RoomRunnerOptions
from concord_jobs.room_runner.simulator import RoomRunner, sample_building

FEW: dict[str, Any] = {"trajectories": 5, "validation_trajectories": 3, "test_trajectories": 2, "shard_size": 2}
TASKS: Sequence[TrajectoryTask] = (RoomRunner(), RoomRunner(size=32), FunnelBoard())
PERTURBED = (RoomRunner(perturbed=True), FunnelBoard(perturbed=True))


def name(task: TrajectoryTask) -> str:
    return task.folder


def quiet(_: str) -> None: ...


@pytest.fixture(scope="module")
def box2d() -> None:
    pytest.importorskip("Box2D")


@pytest.fixture(scope="module")
def made(box2d: None, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("box") / "data"
    said = make_trajectories(RoomRunnerOptions(data=folder, size=32, **FEW), quiet)
    assert said["files_made"] == 3 + 2 + 1
    return folder


def frames_of(folder: Path, task: str = "room-runner") -> dict[str, list[bytes]]:
    data = ShardedData(folder, task)
    return {split: [part[0].numpy().tobytes() for part in Trajectories(data, split)] for split in SPLITS}


# --- what happens


@pytest.mark.parametrize("task", [*TASKS, *PERTURBED], ids=name)
def test_the_label_can_be_read_in_the_frames_of_every_trajectory(box2d: None, task: TrajectoryTask) -> None:
    for number in range(15):
        made = task.trajectory((7, 0, number))
        frames = torch.from_numpy(made.frames)
        assert made.frames.dtype == np.uint8
        assert frames.shape[1:] == task.frame
        share = task.read_label(frames)
        assert share.shape == (len(task.classes),)
        assert share.sum() == pytest.approx(1, abs=1e-6)
        assert int(share.argmax()) == made.label
        assert share[made.label] > 0.75


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_no_prediction_is_no_class_and_trajectories_are_read_in_parallel(box2d: None, task: TrajectoryTask) -> None:
    frames = [torch.from_numpy(task.trajectory((3, 0, number)).frames) for number in range(3)]
    shortest = min(map(len, frames))
    batch = torch.stack([each[-shortest:] for each in frames])
    first = torch.stack([each[0] for each in frames])
    alone = torch.stack([task.read_label(each[-shortest:], each[0]) for each in frames])
    torch.testing.assert_close(task.read_label(batch, first), alone)
    torch.testing.assert_close(task.read_label(batch.float() / 255, first.float() / 255), alone)
    nothing = task.read_label(torch.ones(4, *task.frame), first[0])
    torch.testing.assert_close(nothing, torch.full((len(task.classes),), 1 / len(task.classes)))
    assert task.sees_object(batch).all()
    assert not task.sees_object(torch.ones(2, *task.frame)).any()
    with pytest.raises(InputError, match="must end with"):
        task.read_label(torch.ones(2, 3, 48, 48))


def test_the_smaller_frames_are_the_means_of_the_larger(box2d: None) -> None:
    large, small = RoomRunner().trajectory((5, 0, 1)), RoomRunner(size=32).trajectory((5, 0, 1))
    assert large.label == small.label
    means = large.frames.reshape(-1, 3, 32, 2, 32, 2).astype(float).mean((3, 5))
    assert np.abs(means - small.frames).max() <= 1  # each of them is rounded


@pytest.mark.parametrize("task", [RoomRunner, FunnelBoard])
def test_perturbed_physics_begins_with_the_same_picture(box2d: None, task: Any) -> None:
    pairs = [(task().trajectory((2, 0, n)), task(perturbed=True).trajectory((2, 0, n))) for n in range(6)]
    same = [pair for pair in pairs if pair[0].rejected == pair[1].rejected]
    assert len(same) >= 4
    for standard, perturbed in same:
        assert np.array_equal(standard.frames[0], perturbed.frames[0])
    assert any(not np.array_equal(a.frames[:20], b.frames[:20]) for a, b in same)


def test_a_frame_shows_where_the_ball_was_before(box2d: None) -> None:
    frames = FunnelBoard().trajectory((2, 0, 0)).frames.astype(int)
    blue = (frames[:, 0] < 60) & (frames[:, 1] < 60) & (frames[:, 2] > 200)
    trace = (frames[:, 0] < 150) & (frames[:, 1] > 200) & (frames[:, 2] > 200)
    assert not trace[0].any()
    moved = ~(blue[1:] & blue[:-1]).reshape(len(blue) - 1, -1).any(1)
    assert moved.any()
    for frame in np.flatnonzero(moved) + 1:
        assert trace[frame][blue[frame - 1]].any()


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_a_map_has_one_way_to_the_final_room_and_none_to_the_decoy(seed: int) -> None:
    building = sample_building(np.random.default_rng(seed))
    cells = sum(room.height * room.width for room in building.rooms)
    assert (building.at >= 0).sum() == cells == 6 * len(building.rooms)
    room, seen = building.rooms[0], []
    while room.door is not None:
        seen.append(room)
        y, x, dy, dx = room.door
        assert building.rooms[building.at[y, x]] is room
        room = building.rooms[building.at[y + dy, x + dx]]
    assert room is building.final
    assert building.decoy not in (*seen, room)
    assert building.decoy.door is None


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_a_course_has_funnels_above_platforms_and_sliders_lean_inwards(seed: int) -> None:
    course = sample_course(np.random.default_rng(seed))
    assert len(course.platforms) == 5
    assert np.all(np.abs(np.diff(course.platforms) - 2.5) <= 2.5 / 16)
    assert course.ball_x in (-2.5, 0, 2.5, 5)
    assert len(course.sliders) == 3 * 4 + 3 * 5
    for slider in course.sliders:
        assert np.pi / 24 <= abs(slider.angle) <= np.pi / 5
        if abs(slider.x) == 5:
            assert slider.angle * slider.x > 0


# --- how they are made


def test_trajectories_do_not_depend_on_shards_or_the_number_of_tasks(made: Path, tmp_path: Path) -> None:
    other = {**FEW, "shard_size": 4, "tasks": 1}
    make_trajectories(RoomRunnerOptions(data=tmp_path / "other", size=32, **other), quiet)
    assert frames_of(tmp_path / "other") == frames_of(made)
    mine, theirs = ShardedData(made, "room-runner"), ShardedData(tmp_path / "other", "room-runner")
    assert mine.version == theirs.version
    task = RoomRunner(size=32)
    frames, label = Trajectories(mine, "validation")[2]
    alone = task.trajectory((0, 1, 2))
    assert np.array_equal(frames.numpy(), alone.frames)
    assert int(label) == alone.label


def test_no_trajectory_serves_two_purposes(made: Path) -> None:
    everything = [frames for split in frames_of(made).values() for frames in split]
    assert len(everything) == len(set(everything)) == 5 + 3 + 2


def test_the_command_makes_the_data_and_says_what_they_are(
    box2d: None, ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--trajectories", "1", "--validation-trajectories", "1", "--test-trajectories", "0"]
    assert main(["data", "funnel-board", *few, "--perturbed", "--output", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["job"] == "funnel-board"
    assert Path(said["folder"]) == tmp_path / "data" / "funnel-board-perturbed"
    data = ShardedData(Path(said["folder"]), "funnel-board")
    assert data.manifest["frame"] == [3, 126, 75]
    assert sum(said["labels"].values()) == 2
    with pytest.raises(InputError, match="no trajectories for test; concord data funnel-board makes them"):
        Trajectories(data, "test")
    environments = TrajectoryChoice(perturbed=True).environments(data)
    assert environments["perturbed"].take(slice(None))["frames"].shape[2:] == (3, 126, 75)


# --- how they are read


def test_reading_takes_the_memory_of_one_trajectory_not_of_the_data(tmp_path: Path) -> None:
    frames = np.zeros((40, 3, 64, 64), np.uint8)
    shards: list[list[RowGroupData]] = []
    for shard in range(4):
        shards.append([])
        for number in range(8):
            frames[1:, :, shard, number] = number + 1
            shards[-1].append(RowGroupData({"frames": frames.copy()}, {"label": 0}))
    write_shards(tmp_path, *shards)
    dataset = Trajectories(ShardedData(tmp_path, "made"), "train")
    one, most, before = frames.nbytes, 0, pa.total_allocated_bytes()
    for number in range(len(dataset)):
        read = dataset[number][0]
        most = max(most, pa.total_allocated_bytes() - before)
    assert np.array_equal(read.numpy(), frames)
    assert one <= most < 2.5 * one < len(dataset) * one / 10  # the one before is still there


def test_the_workers_of_a_data_loader_read_what_is_read_here(made: Path) -> None:
    dataset = Trajectories(ShardedData(made, "room-runner"), "train")
    here = [frames.numpy().tobytes() for frames, _ in dataset]
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert [frames.numpy().tobytes() for frames, _ in loader] == here
    assert len(dataset) == 5
    assert np.array_equal(dataset[-1][0].numpy(), dataset[4][0].numpy())
    with pytest.raises(IndexError, match="there are 5 trajectories, and no number 5"):
        dataset[5]


# --- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trajectories": 0}, "--trajectories 0: must be at least 1"),
        ({"test_trajectories": -1}, "--test-trajectories -1: must not be negative"),
        ({"shard_size": 0}, "--shard-size 0: must be at least 1"),
        ({"size": 48}, "size=48: must be one of 64, 32"),
        ({"seed": -1}, "--seed -1: must be from 0 to 4294967295"),
        ({"seed": 2**32}, "--seed 4294967296: must be from 0 to 4294967295"),
        ({"tasks": 0}, "--tasks 0: must be at least 1"),
    ],
)
def test_wrong_options_are_refused_and_leave_nothing(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        make_trajectories(RoomRunnerOptions(**{**FEW, "data": tmp_path / "data", **options}), quiet)
    assert str(error.value) == said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 64}, "frames of 32 × 32 pixels, not 64 × 64"),
        (
            {"size": 32, "perturbed": True, "trajectories": 5},
            "--perturbed True: the data in .* are of the standard physics",
        ),
        ({"size": 32, "trajectories": 6}, "--trajectories 6: .* has 5 for training"),
        ({"data": Path("nowhere")}, "--data nowhere: no data of room-runner; concord data room-runner"),
    ],
)
def test_a_job_refuses_data_that_are_not_its_own(made: Path, options: dict[str, Any], said: str) -> None:
    job = load_job("room-runner").job
    config = job.config.with_options(**{"data": made, **options})
    with pytest.raises(InputError, match=said):
        job.environments(config)
