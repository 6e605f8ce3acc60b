"""Funnel board (thesis, §2.3.1): a ball falls past sliders and through funnels onto one of five platforms.

The ball bounces in a funnel for a while and leaves the funnel at one place, so the bounces do not change its platform.
Box2D, an extra (``box2d``), simulates the physics; of two touching surfaces the larger restitution counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from concord.dynamics.matching import as_float
from concord_jobs.box2d.coverage import Floats, covered, covered_box, scanlines, to_bytes
from concord_jobs.box2d.trajectories import Trajectory, TrajectoryTask

HEIGHT, WIDTH = 126, 75
_SCALE = 6  # pixels a unit
_RIGHT, _TOP = 6.25, 10.0  # of the picture
_EDGE, _END = 6.25, -10.5  # of the board

_STEP, _STEPS, _FRAME = 1 / 30, 750, 3  # seconds; largest number of steps, and steps from frame to frame
_ITERATIONS = (6, 2)
_GRAVITY = -10.0
_RADIUS = 0.25
_START_Y, _START_SPEED = 9.5, (0, -0.001)
_ROWS, _COLUMNS, _ROW_HEIGHT, _COLUMN_WIDTH = 7, 5, 3.0, 2.5
_BALL = {"density": 1.0, "friction": 0.5}
_BALL_RESTITUTION, _PERTURBED_BALL_RESTITUTION = 0.2, 0.05
_SLIDER_THICKNESS, _SLIDER = 0.2, {"friction": 0.5, "restitution": 0.1}
_FUNNEL_WIDTH, _FUNNEL_FRICTION, _FUNNEL_PIECES = 1.1 * _COLUMN_WIDTH, 0.5, 15
_ACROSS = np.linspace(-1, 1, _FUNNEL_PIECES + 1)  # a wall's corners, and their heights in units of its height
_UP = np.arcsin(2 / np.pi * np.arcsin(_ACROSS)) / np.pi
_FUNNEL_CHANCE, _FUNNEL_RESTITUTIONS, _PERTURBED_FUNNEL_RESTITUTION = 0.7, (0.02, 0.6), 0.02
_PLATFORM = {"friction": 1.0, "restitution": 0.0}
_PLATFORM_WIDTH, _PLATFORM_HEIGHT, _PLATFORM_TOP = 2.1, 0.2, _END - _RADIUS - 0.01
_COLOURS = ((0, 1, 0), (1, 1, 0), (1, 0, 0), (1, 0, 1), (0, 0, 1))
_MARGIN = 12  # pixels beyond the picture, so that drawing needs no clipping
_NEXT = np.array([1, 2, 3, 0])
_BALL_PIXELS = 4  # pixels that a ball of 3 pixels can touch, across and down

_LOWEST = slice(114, 124)  # rows of the picture below the last funnels' middle and above the platforms
_BUCKET = WIDTH // _COLUMNS


@dataclass(frozen=True)
class Slider:
    """A bar: its middle, its length, and its angle against the horizontal, in radians, counterclockwise."""

    x: float
    y: float
    width: float
    angle: float


@dataclass(frozen=True)
class Funnel:
    """Two curved walls around (x, y), with ``gap`` between them at the bottom."""

    x: float
    y: float
    height: float
    thickness: float
    gap: float
    restitution: float

    @property
    def walls(self) -> tuple[Floats, Floats, Floats]:
        """The middle lines of the left and the right wall and their heights, ``(pieces + 1,)`` each, from below.

        As a function of the height a wall's middle is a sine of a sine: steep at both ends.
        """
        middle, half = self.spread
        across = middle + half * _ACROSS
        return self.x - across, self.x + across, self.y + self.height * _UP

    @property
    def spread(self) -> tuple[float, float]:
        """The mean distance of a wall from the funnel's middle, and the deviation from it at the wall's ends."""
        spread = (_FUNNEL_WIDTH - 2 * self.thickness - self.gap) / 2
        return (self.thickness + self.gap + spread) / 2, spread / 2


@dataclass(frozen=True)
class Course:
    """The way of the ball: its start, the obstacles, and the middles of the platforms, from the left."""

    ball_x: float
    sliders: Sequence[Slider]
    funnels: Sequence[Funnel]
    platforms: Sequence[float]


def sample_course(rng: np.random.Generator) -> Course:
    """A course: rows of 5 and 4 columns in turn, from below; the lowest has no sliders, the highest no funnels."""
    sliders, funnels = [], []
    for row in range(_ROWS):
        columns = _COLUMNS - row % 2
        for column in range(columns):
            x = (row % 2 / 2 + column - 2) * _COLUMN_WIDTH
            if row > 0:
                angle = rng.uniform(np.pi / 24, np.pi / 5)
                leans_left = rng.random() < 0.5
                if columns == _COLUMNS and column in (0, _COLUMNS - 1):  # inwards at the board's sides
                    leans_left = column == _COLUMNS - 1
                width = rng.uniform(0.6, 0.8) * (_COLUMN_WIDTH - 2 * _RADIUS)
                sliders.append(Slider(x, (row - 3.5) * _ROW_HEIGHT, width, angle if leans_left else -angle))
            if row == 0 or (row < _ROWS - 1 and rng.random() < _FUNNEL_CHANCE):
                funnels.append(
                    Funnel(
                        x + rng.uniform(-1, 1) * _COLUMN_WIDTH / 32,
                        (row - 3) * _ROW_HEIGHT + rng.uniform(-1, 3) * _ROW_HEIGHT / 16,
                        height=rng.uniform(1.4, 1.52),
                        thickness=rng.uniform(0.15, 0.3),
                        gap=rng.uniform(2.09, 2.2) * _RADIUS,
                        restitution=_FUNNEL_RESTITUTIONS[int(rng.integers(2))],
                    )
                )
    ball_x = (int(rng.integers(4)) - 1) * _COLUMN_WIDTH
    return Course(ball_x, sliders, funnels, [funnel.x for funnel in funnels[:_COLUMNS]])


@dataclass(frozen=True)
class Fall:
    """The ball's middle (x, y) at each frame, ``(frames, 2)``, and its platform, counted from the left."""

    path: npt.NDArray[np.float64]
    label: int


def simulate(course: Course, perturbed: bool) -> Fall | None:
    """Let the ball fall; None if it takes too long or leaves the board at the side."""
    from Box2D import b2CircleShape, b2FixtureDef, b2PolygonShape, b2World

    world = b2World(gravity=(0, _GRAVITY), doSleep=True)
    fixtures = []
    for slider in course.sliders:
        place = ((slider.x, slider.y), slider.angle)
        bar = b2PolygonShape(box=(slider.width / 2, _SLIDER_THICKNESS / 2, *place))
        fixtures.append(b2FixtureDef(shape=bar, **_SLIDER))
    for funnel in course.funnels:
        restitution = _PERTURBED_FUNNEL_RESTITUTION if perturbed else funnel.restitution
        surface = {"friction": _FUNNEL_FRICTION, "restitution": restitution}
        fixtures += [b2FixtureDef(shape=b2PolygonShape(vertices=each), **surface) for each in _pieces(funnel)]
    for x in course.platforms:
        middle = (x, _PLATFORM_TOP - _PLATFORM_HEIGHT / 2)
        platform = b2PolygonShape(box=(_PLATFORM_WIDTH / 2, _PLATFORM_HEIGHT / 2, middle, 0))
        fixtures.append(b2FixtureDef(shape=platform, **_PLATFORM))
    world.CreateStaticBody(fixtures=fixtures)
    restitution = _PERTURBED_BALL_RESTITUTION if perturbed else _BALL_RESTITUTION
    ball = b2FixtureDef(shape=b2CircleShape(radius=_RADIUS), restitution=restitution, **_BALL)
    body = world.CreateDynamicBody(position=(course.ball_x, _START_Y), fixtures=ball, linearVelocity=_START_SPEED)
    x, y = body.position
    path, steps = [(x, y)], 0
    last = crossing = None
    while last is None or steps < last:
        if last is None and steps == _STEPS:
            return None
        body.awake = True
        world.Step(_STEP, *_ITERATIONS)
        before, (x, y) = (x, y), body.position
        steps += 1
        if steps % _FRAME == 0:
            path.append((x, y))
        if last is None and y <= _END:
            part = (before[1] - _END) / (before[1] - y)
            crossing = before[0] + part * (x - before[0])
            last = steps + -steps % _FRAME
    if crossing is None or abs(crossing) > _EDGE:
        return None
    return Fall(np.array(path), int(np.abs(np.array(course.platforms) - crossing).argmin()))


def _pieces(funnel: Funnel) -> Iterator[list[tuple[float, float]]]:
    """The corners of the pieces of both walls."""
    left, right, heights = (line.tolist() for line in funnel.walls)
    half = funnel.thickness / 2
    for wall in (left, right):
        for low, high, y, top in zip(wall, wall[1:], heights, heights[1:], strict=False):
            yield [(low - half, y), (low + half, y), (high + half, top), (high - half, top)]


def _columns(x: npt.ArrayLike) -> Floats:
    return ((np.asarray(x) + _RIGHT) * _SCALE).astype(np.float32)


def _rows(y: npt.ArrayLike) -> Floats:
    return ((_TOP - np.asarray(y)) * _SCALE).astype(np.float32)


def draw_course(course: Course) -> tuple[Floats, Floats]:
    """The obstacles' colours, ``(height, width, 3)``, and the visible part of the ground.

    Both have :data:`_MARGIN` more pixels on each side.
    """
    through = np.ones((HEIGHT + 2 * _MARGIN, WIDTH + 2 * _MARGIN), np.float32)
    for first, left, right, rows, columns in (_slider_lines(course.sliders), _wall_lines(course.funnels)):
        there = right > left
        begin = np.where(there, left, np.inf).min(-1).astype(int)
        coverage = covered(left, right, begin, columns)
        corners = zip((first + _MARGIN).tolist(), (begin + _MARGIN).tolist(), strict=True)
        for (row, column), each in zip(corners, 1 - coverage, strict=True):
            through[row : row + rows, column : column + columns] *= each
    seen = np.zeros((*through.shape, 3), np.float32)
    for x, colour in zip(course.platforms, _COLOURS, strict=True):
        left, right = (_columns([x - _PLATFORM_WIDTH / 2, x + _PLATFORM_WIDTH / 2]) + _MARGIN).tolist()
        top, bottom = (_rows([_PLATFORM_TOP, _PLATFORM_TOP - _PLATFORM_HEIGHT]) + _MARGIN).tolist()
        down, across, coverage = covered_box((left, top, right, bottom), *through.shape)
        seen[down, across] += coverage[..., None] * np.array(colour, np.float32)
        through[down, across] *= 1 - coverage
    return seen, through


_Lines = tuple[npt.NDArray[np.int64], Floats, Floats, int, int]  # first row, left, right; rows and columns at most


def _slider_lines(sliders: Sequence[Slider]) -> _Lines:
    """The left and right end of each slider at each scanline, which crosses two of its edges."""
    x, y, width, angle = (
        np.array([getattr(each, name) for each in sliders])[:, None] for name in ("x", "y", "width", "angle")
    )
    along, up = width / 2 * np.array([1, 1, -1, -1]), _SLIDER_THICKNESS / 2 * np.array([1, -1, -1, 1])
    at_x = _columns(x + along * np.cos(angle) - up * np.sin(angle))
    at_y = _rows(y + along * np.sin(angle) + up * np.cos(angle))
    first = np.floor(at_y.min(1)).astype(int)
    rows, columns = 8, 12  # of the longest and steepest
    lines = scanlines(first, rows)[:, None]
    x0, y0, x1, y1 = (each[..., None] for each in (at_x, at_y, at_x[:, _NEXT], at_y[:, _NEXT]))
    crosses = (lines >= np.minimum(y0, y1)) & (lines < np.maximum(y0, y1))
    crossing = x0 + (lines - y0) / np.where(y1 == y0, 1, y1 - y0) * (x1 - x0)
    some = crosses.any(1)
    left = np.where(some, np.where(crosses, crossing, np.inf).min(1), 0)
    right = np.where(some, np.where(crosses, crossing, -np.inf).max(1), 0)
    return first, left, right, rows, columns


def _wall_lines(funnels: Sequence[Funnel]) -> _Lines:
    """The left and right ends of the left walls of all funnels, and then of the right walls."""
    x, y, height, thickness = (
        np.array([getattr(each, name) for each in funnels])[:, None] for name in ("x", "y", "height", "thickness")
    )
    middle, half = np.array([each.spread for each in funnels]).T[..., None]
    first = np.floor(_rows(y + height / 2)[:, 0]).astype(int)
    rows, columns = 11, 9
    up = (_TOP - scanlines(first, rows) / _SCALE - y) / height
    across = middle + half * np.interp(up, _UP, _ACROSS)
    inside = np.abs(up) <= 0.5
    thick = np.where(inside, thickness / 2 * _SCALE, 0)
    walls = np.concatenate([_columns(x - across), _columns(x + across)])
    thick = np.concatenate([thick, thick]).astype(np.float32)
    return np.concatenate([first, first]), walls - thick, walls + thick, rows, columns


def draw(course: Course, path: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """The frames, ``(frames, 3, 126, 75)``: the course once, the ball and its trace at each place of its path.

    The trace shows the ball's place in the previous frame: pixels have less red where the picture became brighter, and
    less green where it became darker.
    """
    seen, through = draw_course(course)
    canvas = seen + through[..., None]  # the ground is white
    background = to_bytes(canvas)

    radius = _RADIUS * _SCALE
    x, y = _columns(path[:, 0]) + _MARGIN, _rows(path[:, 1]) + _MARGIN
    first_x = np.clip(np.floor(x - radius), 0, canvas.shape[1] - _BALL_PIXELS).astype(int)
    first_y = np.clip(np.floor(y - radius), 0, canvas.shape[0] - _BALL_PIXELS).astype(int)
    chord = radius**2 - (scanlines(first_y, _BALL_PIXELS) - y[:, None]) ** 2
    half = np.sqrt(np.maximum(chord, 0))
    ball = covered(x[:, None] - half, x[:, None] + half, first_x, _BALL_PIXELS)
    at_y = first_y[:, None, None] + np.arange(_BALL_PIXELS)[:, None]
    at_x = first_x[:, None, None] + np.arange(_BALL_PIXELS)
    patches = canvas[at_y, at_x]
    patches[..., :2] -= (ball * through[at_y, at_x])[..., None]  # white becomes blue
    drawn = to_bytes(np.clip(patches, 0, 1))

    frames = np.empty((len(path), 3, HEIGHT, WIDTH), np.uint8)
    frames[:] = background[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN].transpose(2, 0, 1)
    gray = background.astype(np.int16).sum(-1) // 3
    drawn_gray = drawn.astype(np.int16).sum(-1) // 3
    places = list(zip(first_y.tolist(), first_x.tolist(), strict=True))
    for number, (row, column) in enumerate(places):
        old_row, old_column = places[max(number - 1, 0)]
        top, left = min(row, old_row), min(column, old_column)
        # A box with both places of the ball: the previous gray, the present gray and colours.
        box = (slice(top, max(row, old_row) + _BALL_PIXELS), slice(left, max(column, old_column) + _BALL_PIXELS))
        here, there = _ball_box(row - top, column - left), _ball_box(old_row - top, old_column - left)
        now, before, pixels = gray[box].copy(), gray[box].copy(), background[box].astype(np.int16)
        now[here], before[there] = drawn_gray[number], drawn_gray[max(number - 1, 0)]
        pixels[here] = drawn[number]
        rise = now - before
        pixels[..., 0] -= np.maximum(rise, 0)
        pixels[..., 1] -= np.maximum(-rise, 0)
        _put(frames[number], top - _MARGIN, left - _MARGIN, np.maximum(pixels, 0))
    return frames


def _ball_box(row: int, column: int) -> tuple[slice, slice]:
    return slice(row, row + _BALL_PIXELS), slice(column, column + _BALL_PIXELS)


def _put(frame: npt.NDArray[np.uint8], top: int, left: int, pixels: npt.NDArray[np.int16]) -> None:
    """Put ``(rows, columns, 3)`` into ``(3, height, width)``; pixels outside are left out."""
    inside = pixels[max(-top, 0) : HEIGHT - top, max(-left, 0) : WIDTH - left]
    top, left = max(top, 0), max(left, 0)
    frame[:, top : top + len(inside), left : left + inside.shape[1]] = inside.transpose(2, 0, 1)


@dataclass(frozen=True, kw_only=True)
class FunnelBoard(TrajectoryTask):
    """The task. If perturbed, ball and funnels hardly bounce. A label is a platform, counted from the left."""

    name = "funnel-board"
    classes = ("1", "2", "3", "4", "5")

    @property
    def frame(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""
        return 3, HEIGHT, WIDTH

    def attempt(self, rng: np.random.Generator) -> Trajectory | None:
        """A random course; None unless the ball lands in time."""
        course = sample_course(rng)
        fall = simulate(course, self.perturbed)
        return None if fall is None else Trajectory(draw(course, fall.path), fall.label)

    def read_label(self, frames: Tensor, first: Tensor | None = None) -> Tensor:
        """The share of the ball just above each platform; a fifth each where none is visible there."""
        self.require_frames(frames)
        ball = _ball(as_float(frames[..., _LOWEST, :]))
        seen = ball.unflatten(-1, (_COLUMNS, _BUCKET)).sum((-4, -3, -1))
        share: Tensor = (seen + 1e-3 / _COLUMNS) / (seen.sum(-1, keepdim=True) + 1e-3)
        return share

    def sees_object(self, frames: Tensor) -> Tensor:
        """Whether the ball is visible above the platforms."""
        return _ball(as_float(frames[..., : _LOWEST.stop, :])).flatten(-2).amax(-1) > 0.04


def _ball(frames: Tensor) -> Tensor:
    """How blue each pixel is, ``(..., height, width)``; 0 below 0.3."""
    red, green, blue = frames.unbind(-3)
    like = (1 - red) * (1 - green) * blue
    return like * (like >= 0.3)
