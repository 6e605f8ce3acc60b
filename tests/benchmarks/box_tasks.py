"""Making a trajectory of the Box2D tasks against its physics alone; as a command, statistics of the trajectories.

``python tests/benchmarks/box_tasks.py`` prints the statistics of 400 trajectories of each task, also perturbed. With a
folder, ``python tests/benchmarks/box_tasks.py docs/figures`` draws a trajectory of each task there.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from concord.analysis.trajectory_figures import moving_picture
from concord.benchmark import Row, interleaved
from concord.environments.sharded import RowGroupData, shard_of
from concord.extras import require_extra
from concord_jobs.box2d.trajectories import TrajectoryTask
from concord_jobs.funnel_board import simulator as funnel_board
from concord_jobs.funnel_board.simulator import FunnelBoard
from concord_jobs.room_runner import simulator as room_runner
from concord_jobs.room_runner.simulator import RoomRunner

TRAJECTORIES, TRIED = 5, 400


def rows() -> Iterator[Row]:
    """Seconds to make trajectories with frames, and to simulate them alone, rejected ones included."""
    require_extra("box2d", "box_tasks")
    tasks: Sequence[tuple[TrajectoryTask, Callable[[Sequence[int]], object]]] = (
        (RoomRunner(), _walk),
        (FunnelBoard(), _fall),
    )
    for task, physics in tasks:
        keys = [(0, 0, number) for number in range(TRAJECTORIES)]

        def whole(task: TrajectoryTask = task, keys: Sequence[Sequence[int]] = keys) -> None:
            shard_of([RowGroupData({"frames": task.trajectory(key).frames}) for key in keys])

        def alone(physics: Callable[..., object] = physics, keys: Sequence[Sequence[int]] = keys) -> None:
            for key in keys:
                attempt = 0
                while physics([*key, attempt]) is None:
                    attempt += 1

        mine, reference, ratio = interleaved(whole, alone, repeats=9, warmup=1)
        name = f"{TRAJECTORIES} trajectories of {task.name}"
        yield Row(name, mine, "their physics alone", reference, ratio, "≤ 2")


def _walk(key: Sequence[int]) -> object:
    rng = np.random.default_rng(key)
    return room_runner.simulate(room_runner.sample_building(rng), rng, False)


def _fall(key: Sequence[int]) -> object:
    return funnel_board.simulate(funnel_board.sample_course(np.random.default_rng(key)), False)


def statistics(task: TrajectoryTask, perturbed: TrajectoryTask) -> str:
    """Lengths, rejected courses, labels, labels read by ψ, and the number of labels that the other physics keeps."""
    lengths, labels, shares, right, rejected = [], [], [], 0, 0
    same = both = 0
    other_lengths = []
    for number in range(TRIED):
        made = task.trajectory((1234, 0, number))
        share = task.read_label(torch.from_numpy(made.frames))
        lengths.append(len(made.frames))
        labels.append(made.label)
        shares.append(float(share[made.label]))
        right += int(share.argmax()) == made.label
        rejected += made.rejected
        other = perturbed.trajectory((1234, 0, number))
        if other.rejected == made.rejected:  # the course is then the same
            both += 1
            same += made.label == other.label
            other_lengths.append((len(made.frames), len(other.frames)))
    low, high = np.percentile(lengths, [5, 95])
    before, after = np.mean(other_lengths, 0)
    return (
        f"{task.name}: {np.mean(lengths):.1f} ± {np.std(lengths) / TRIED**0.5:.1f} frames (5 % to 95 %: {low:.0f} to "
        f"{high:.0f}, largest {max(lengths)}); {rejected} of {rejected + TRIED} courses rejected "
        f"({rejected / (rejected + TRIED):.1%}); labels {np.bincount(labels).tolist()}; "
        f"read rightly {right} of {TRIED}, mean share {np.mean(shares):.4f}; perturbed, same course: "
        f"{same} of {both} labels the same ({same / both:.1%}), frames {before:.1f} to {after:.1f}"
    )


def _counts() -> str:
    rooms, doors, passed = [], [], []
    for number in range(TRIED):
        rng = np.random.default_rng((1234, 0, number, 0))
        building = room_runner.sample_building(rng)
        if room_runner.simulate(building, rng, False) is None:
            continue
        rooms.append(len(building.rooms))
        doors.append(sum(room.door is not None for room in building.rooms))
        room, count = building.rooms[0], 0
        while room.child is not None:
            room, count = room.child, count + 1
        passed.append(count)
    return f"maps: {np.mean(rooms):.1f} rooms, {np.mean(doors):.1f} doors, {np.mean(passed):.1f} on the way"


def _draw(folder: Path) -> None:
    for task, number in ((RoomRunner(), 3), (FunnelBoard(), 4)):
        frames = task.trajectory((1234, 0, number)).frames
        _strip(frames, 9).save(folder / f"{task.name}-frames.png", optimize=True)
        moving_picture(torch.from_numpy(frames), folder / f"{task.name}.gif", milliseconds=80, scale=3)


def _strip(frames: npt.NDArray[np.uint8], count: int, gap: int = 2) -> Image.Image:
    """Evenly spread frames, from the first to the last, side by side and twice as large."""
    chosen = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
    padded = np.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, gap)), constant_values=255)
    row = padded.transpose(2, 0, 3, 1).reshape(frames.shape[2], -1, 3)[:, :-gap]
    return Image.fromarray(row.repeat(2, 0).repeat(2, 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        _draw(Path(sys.argv[1]))
        sys.exit()
    print(statistics(RoomRunner(), RoomRunner(perturbed=True)), flush=True)
    print(_counts(), flush=True)
    print(statistics(FunnelBoard(), FunnelBoard(perturbed=True)))
