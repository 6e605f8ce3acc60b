"""Room runner (thesis, §2.3.1): an agent walks from room to room to a dead end, seen from above; is it red or blue?

A map of rooms grows on 16 × 16 cells from a first room. Each room has one door, to one of the rooms that grew from it.
Two dead ends are coloured, by a fair coin: the one that the doors lead to, and a decoy. The agent steers to the door of
its room by constant forces, large in some rooms and small in others. The physics is Box2D's, an extra (``box2d``).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from concord.dynamics.matching import as_float
from concord.errors import ArgumentError
from concord_jobs.box2d.coverage import Floats, block_means, covered_box, overlap, to_bytes
from concord_jobs.box2d.trajectories import Trajectory, TrajectoryTask

SIZES = (64, 32)
CELLS = 16
_DRAWN = 16  # pixels a cell before the mean over blocks

_STEP, _STEPS, _FRAME, _AFTER = 0.1, 300, 3, 6  # seconds; steps: at most, from frame to frame, and in the last room
_ITERATIONS = (5, 8)
_HALF_SIDE, _DRAWN_LARGER = 0.24, 1.5
_WALL = 0.2
_FRICTION, _RESTITUTION = 0.4, 0.3
_FORCES, _DRAG = (10.0, 3.5), 5.0
_ROOMS = ((3, 2), (2, 3))  # heights and widths
_WHITE, _GROUND, _DOOR, _AGENT = (1, 1, 1), (0.15, 0.15, 0.15), (0.9, 0.95, 1), (0, 0.8, 0)
# The uncovered part of the two pixels on each side of a wall's middle: it is 3.2 pixels thick.
_BESIDE_WALL = np.array([2 - _WALL / 2 * _DRAWN, 0, 0, 2 - _WALL / 2 * _DRAWN], np.float32)
_RED, _BLUE = (1, 0.5, 0.5), (0.5, 0.5, 1)


@dataclass(eq=False)
class Room:
    """A rectangle of cells; y counts upwards.

    Attributes:
        y, x: its lowest row and leftmost column.
        height, width: in cells.
        children: the rooms that grew from it.
        child: the child to which its door leads.
        door: the door to this child: a cell of this room, and the direction (dy, dx) from the cell.
    """

    y: int
    x: int
    height: int
    width: int
    children: list["Room"] = field(default_factory=list)
    child: "Room | None" = None
    door: tuple[int, int, int, int] | None = None

    @property
    def dead_end(self) -> "Room":
        """The dead end to which the doors lead from this room."""
        return self if self.child is None else self.child.dead_end

    def cells(self) -> tuple[slice, slice]:
        """The room's rows and columns on the map."""
        return slice(self.y, self.y + self.height), slice(self.x, self.x + self.width)

    def border(self, other: "Room") -> list[tuple[int, int, int, int]]:
        """The cells of this room beside a neighbour, each with the direction to it."""
        rows = range(max(self.y, other.y), min(self.y + self.height, other.y + other.height))
        columns = range(max(self.x, other.x), min(self.x + self.width, other.x + other.width))
        if other.x == self.x + self.width:
            return [(y, self.x + self.width - 1, 0, 1) for y in rows]
        if other.x + other.width == self.x:
            return [(y, self.x, 0, -1) for y in rows]
        if other.y == self.y + self.height:
            return [(self.y + self.height - 1, x, 1, 0) for x in columns]
        return [(self.y, x, -1, 0) for x in columns]


@dataclass(frozen=True)
class Building:
    """A map of rooms.

    Attributes:
        rooms: all of them; the agent begins in the lower left cell of the first.
        at: ``(cells, cells)``, the number of the room there, -1 where none is.
        final, decoy: the coloured rooms.
        label: 1 where the final room is blue, 0 where it is red.
    """

    rooms: Sequence[Room]
    at: npt.NDArray[np.int64]
    final: Room
    decoy: Room
    label: int


def sample_building(rng: np.random.Generator) -> Building:
    """A random map: from every 8th room, the first included, two rooms may grow, from all others one."""
    at = np.full((CELLS, CELLS), -1)
    rooms: list[Room] = []

    def add(room: Room) -> Room:
        at[room.cells()] = len(rooms)
        rooms.append(room)
        return room

    queue = deque([add(Room(int(rng.integers(5, 8)), int(rng.integers(5, 9)), 3, 2))])
    taken = 0
    while queue:
        room = queue.popleft()
        for _ in range(2 if taken % 8 == 0 else 1):
            height, width = _ROOMS[0 if rng.random() < 0.5 else 1]
            free = [(y, x) for y, x in _beside(room, height, width) if _is_free(at, y, x, height, width)]
            if free:
                y, x = free[int(rng.integers(len(free)))]
                room.children.append(add(Room(y, x, height, width)))
        if room.children:
            room.child = room.children[int(rng.integers(len(room.children)))]
            border = room.border(room.child)
            room.door = border[int(rng.integers(len(border)))]
        queue.extend(room.children)
        taken += 1
    decoy = next(child for child in rooms[0].children if child is not rooms[0].child)
    return Building(rooms, at, rooms[0].dead_end, decoy.dead_end, label=int(rng.integers(2)))


def _beside(room: Room, height: int, width: int) -> Iterator[tuple[int, int]]:
    """The places at which a room of this size shares a wall with this one."""
    for x in range(room.x - width + 1, room.x + room.width):
        yield from ((room.y + room.height, x), (room.y - height, x))
    for y in range(room.y - height + 1, room.y + room.height):
        yield from ((y, room.x - width), (y, room.x + room.width))


def _is_free(at: npt.NDArray[np.int64], y: int, x: int, height: int, width: int) -> bool:
    inside = 0 <= y <= CELLS - height and 0 <= x <= CELLS - width
    return inside and bool((at[y : y + height, x : x + width] < 0).all())


def simulate(building: Building, rng: np.random.Generator, perturbed: bool) -> npt.NDArray[np.float64] | None:
    """The lower left corner of the agent's cell at each frame, ``(frames, 2)`` as (y, x); None if it takes too long."""
    from Box2D import b2FixtureDef, b2PolygonShape, b2World

    world = b2World(gravity=(0, 0), doSleep=True)
    surface = {"friction": _FRICTION, "restitution": _RESTITUTION}
    world.CreateStaticBody(
        fixtures=[
            b2FixtureDef(shape=b2PolygonShape(box=(half_x, half_y, (x, y), 0)), **surface)
            for y, x, half_y, half_x in _wall_boxes(building)
        ]
    )
    start = building.rooms[0]
    body = world.CreateDynamicBody(
        position=(start.x, start.y),
        fixtures=b2FixtureDef(shape=b2PolygonShape(box=(_HALF_SIDE, _HALF_SIDE, (0.5, 0.5), 0)), **surface),
        fixedRotation=True,
    )
    at, previous, force = building.at.tolist(), -1, _FORCES[0]
    end = building.rooms.index(building.final)
    x, y = body.position
    path, steps, last = [(y, x)], 0, None
    while last is None or steps < last:
        number = at[int(y + 0.5)][int(x + 0.5)]
        if number == end and last is None:
            reached = steps + _AFTER
            last = reached + -reached % _FRAME
        if number < 0 or (last is None and steps == _STEPS):
            return None
        if number != previous:
            force = _FORCES[0] if rng.random() < 0.5 or perturbed else _FORCES[1]
            previous = number
        to_y, to_x = _target(building.rooms[number], y, x)
        speed_x, speed_y = body.linearVelocity
        forces = (force * _sign(to_x - x) - _DRAG * speed_x, force * _sign(to_y - y) - _DRAG * speed_y)
        body.ApplyForceToCenter(forces, True)
        world.Step(_STEP, *_ITERATIONS)
        x, y = body.position
        steps += 1
        if steps % _FRAME == 0:
            path.append((y, x))
    return np.array(path)


def _sign(value: float) -> float:
    return float((value > 0) - (value < 0))


def _target(room: Room, y: float, x: float) -> tuple[float, float]:
    """The agent's target: from afar the room's centre, then the door, and just before the door, behind it."""
    centre_y, centre_x = room.y + room.height / 2 - 0.5, room.x + room.width / 2 - 0.5
    if room.door is None:
        return centre_y, centre_x
    door_y, door_x, dy, dx = room.door
    to_y, to_x = door_y + 0.5 * dy, door_x + 0.5 * dx
    away_y, away_x = to_y - y, to_x - x
    far = min(1.0, float(np.hypot(away_y, away_x)) / 2)
    to_y += dy * (0.25 - min(0.9, abs(away_x)))
    to_x += dx * (0.25 - min(0.9, abs(away_y)))
    return (1 - far) * to_y + far * centre_y, (1 - far) * to_x + far * centre_x


def _wall_boxes(building: Building) -> Iterator[tuple[float, float, float, float]]:
    """Centre and half sides (y, x, half height, half width) of a wall on each cell border that has one."""
    lying = np.zeros((CELLS + 1, CELLS), bool)
    standing = np.zeros((CELLS, CELLS + 1), bool)
    lying[[0, -1]] = True
    standing[:, [0, -1]] = True
    for room in building.rooms:
        rows, columns = room.cells()
        lying[[rows.start, rows.stop], columns] = True
        standing[rows, [[columns.start], [columns.stop]]] = True
    for room in building.rooms:
        if room.door is not None:
            y, x, dy, dx = room.door
            if dx:
                standing[y, x + (dx > 0)] = False
            else:
                lying[y + (dy > 0), x] = False
    for y, x in np.argwhere(lying).tolist():
        yield y, x + 0.5, _WALL / 2, 0.5
    for y, x in np.argwhere(standing).tolist():
        yield y + 0.5, x, 0.5, _WALL / 2


def _floor(building: Building) -> Floats:
    """The colour of each cell, ``(cells, cells, 3)``, the highest row first."""
    colours = np.empty((CELLS, CELLS, 3), np.float32)
    colours[:] = np.where((building.at >= 0)[..., None], _WHITE, _GROUND)
    for room, blue in ((building.final, building.label == 1), (building.decoy, building.label == 0)):
        colours[room.cells()] = _BLUE if blue else _RED
    return colours[::-1]


def _walls_and_doors(building: Building) -> tuple[Floats, Floats]:
    """The visible fraction of the floor, and the fraction covered by doors, ``(256, 256)`` each."""
    side = CELLS * _DRAWN
    seen, door = np.ones((side, side), np.float32), np.zeros((side, side), np.float32)
    upwards = seen[::-1]  # y counts upwards
    for room in building.rooms:
        rows, columns = (slice(each.start * _DRAWN, each.stop * _DRAWN) for each in room.cells())
        for edge in (rows.start, rows.stop):
            wall = slice(max(edge - 2, 0), edge + 2)
            upwards[wall, columns] *= _BESIDE_WALL[wall.start - edge + 2 :][: side - wall.start, None]
        for edge in (columns.start, columns.stop):
            wall = slice(max(edge - 2, 0), edge + 2)
            upwards[rows, wall] *= _BESIDE_WALL[wall.start - edge + 2 :][: side - wall.start]
    for room in building.rooms:
        if room.door is not None:
            y, x, dy, dx = room.door
            low, left = y + 0.25 - 0.4 * (dy < 0), x + 0.25 - 0.4 * (dx < 0)
            high, right = low + 0.5 + 0.4 * abs(dy), left + 0.5 + 0.4 * abs(dx)
            box = (left * _DRAWN, (CELLS - high) * _DRAWN, right * _DRAWN, (CELLS - low) * _DRAWN)
            rows, columns, coverage = covered_box(box, side, side)
            door[rows, columns] = coverage
            seen[rows, columns] *= 1 - coverage
    return seen, door


def draw(building: Building, path: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.uint8]:
    """The frames, ``(frames, 3, size, size)``: the map, drawn once, with the agent at each place of its path.

    A pixel is the mean of 4 × 4 drawn pixels for a size of 64, of 8 × 8 for 32.
    """
    block = CELLS * _DRAWN // size
    seen, door = _walls_and_doors(building)
    floor: Floats = _floor(building).repeat(size // CELLS, 0).repeat(size // CELLS, 1)
    door_colour: Floats = np.array(_DOOR, np.float32)
    agent_colour: Floats = np.array(_AGENT, np.float32)
    background = floor.copy()
    background *= block_means(seen, block)[..., None]
    background += door_colour * block_means(door, block)[..., None]
    frames = np.empty((len(path), 3, size, size), np.uint8)
    frames[:] = to_bytes(background).transpose(2, 0, 1)

    half = _HALF_SIDE * _DRAWN_LARGER * _DRAWN
    centre = (path + 0.5) * _DRAWN
    count = int(2 * half / block) + 2  # blocks that the agent can touch
    windows = []
    for middle in (CELLS * _DRAWN - centre[:, 0], centre[:, 1]):
        first = np.clip(((middle - half) // block).astype(int), 0, size - count)
        pixels = first[:, None] * block + np.arange(count * block)
        windows.append((first, pixels, overlap(middle - half, middle + half, first * block, count * block)))
    (rows, y, covers_y), (columns, x, covers_x) = windows
    agent = covers_y[:, :, None] * covers_x[:, None, :]
    at = (y[:, :, None], x[:, None, :])
    of_floor, of_door = (block_means(each[at] * (1 - agent), block)[..., None] for each in (seen, door))
    blocks = np.arange(count)
    below = floor[(rows[:, None] + blocks)[:, :, None], (columns[:, None] + blocks)[:, None, :]]
    patches: Floats = below * of_floor + door_colour * of_door + agent_colour * block_means(agent, block)[..., None]
    drawn = to_bytes(patches).transpose(0, 3, 1, 2)
    for frame, row, column, patch in zip(frames, rows.tolist(), columns.tolist(), drawn, strict=True):
        frame[:, row : row + count, column : column + count] = patch
    return frames


@dataclass(frozen=True, kw_only=True)
class RoomRunner(TrajectoryTask):
    """The task. If perturbed, the agent's forces are large in every room. Label 1 is blue."""

    size: int = 64
    """Pixels of height and width: 64 or 32."""

    name = "room-runner"
    classes = ("red", "blue")

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ArgumentError("size", self.size, f"must be one of {', '.join(map(str, SIZES))}")

    @property
    def frame(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""
        return 3, self.size, self.size

    @property
    def folder(self) -> str:
        """The default name of the folder with its data."""
        return f"{self.name}-{self.size}{'-perturbed' if self.perturbed else ''}"

    @property
    def command(self) -> str:
        """The command that makes its data."""
        size = f" --size {self.size}" if self.size != RoomRunner.size else ""
        return f"concord data {self.name}{size}{' --perturbed' if self.perturbed else ''}"

    def attempt(self, rng: np.random.Generator) -> Trajectory | None:
        """A random map; None unless the agent arrives in time."""
        building = sample_building(rng)
        path = simulate(building, rng, self.perturbed)
        return None if path is None else Trajectory(draw(building, path, self.size), building.label)

    def read_label(self, frames: Tensor, first: Tensor | None = None) -> Tensor:
        """The shares of the agent in, or just before, the red and the blue room; half each if it is in neither.

        The rooms are found in ``first``.
        """
        self.require_frames(frames)
        frames = as_float(frames)
        first = frames[..., 0, :, :, :] if first is None else as_float(first)
        red, green, blue = frames.unbind(-3)
        # The smaller agent covers no whole pixel; no gray reaches 0.15.
        agent = (1 - red) * green * (1 - blue) > (0.25 if self.size == SIZES[0] else 0.15)
        seen = torch.stack([(agent * room[..., None, :, :]).sum((-3, -2, -1)) for room in self._rooms(first)], -1)
        share: Tensor = (seen + 1e-4) / (seen.sum(-1, keepdim=True) + 2e-4)
        return share

    def sees_object(self, frames: Tensor) -> Tensor:
        """Whether the agent is visible."""
        red, green, blue = as_float(frames).unbind(-3)
        like = (1 - red) * (1 - 1.5 * (green - 0.8) ** 2) * (1 - blue)
        # A wall between white pixels is gray; ``like`` does not distinguish it from the smaller agent.
        green_only = (green - torch.maximum(red, blue)) > 0.1
        return ((like > 0.25) & green_only).flatten(-2).any(-1)

    def _rooms(self, first: Tensor) -> list[Tensor]:
        """Masks of the red and the blue room, each grown into the white around it: ``(..., size, size)``."""
        red, green, blue = first.unbind(-3)
        white = first.mean(-3) > 0.9
        rooms = (red * (1 - green) * (1 - blue) > 0.15, (1 - red) * (1 - green) * blue > 0.15)
        return [self._smooth(self._grown(room, white)).reshape(room.shape) for room in rooms]

    def _grown(self, room: Tensor, white: Tensor) -> Tensor:
        grown = room.float().reshape(-1, 1, self.size, self.size)
        room, white = grown.bool(), white.reshape(grown.shape)
        for _ in range(self.size // 8):  # half a room
            grown = (nn.functional.max_pool2d(grown, 3, stride=1, padding=1).bool() & white).float()
        return (room | grown.bool()).float()

    def _smooth(self, room: Tensor) -> Tensor:
        kernel = torch.tensor([1.0, 2.0, 1.0], device=room.device) / 4
        padded = nn.functional.pad(room, (1, 1, 1, 1), mode="replicate")
        smooth: Tensor = nn.functional.conv2d(padded, (kernel[:, None] * kernel)[None, None])
        return smooth
