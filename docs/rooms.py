"""Draws the rooms of the platform as their imports make them: ``make rooms`` writes docs/figures/rooms.png.

A room stands above all rooms that it imports. An arrow is drawn only where no longer way leads along it.
"""

from collections.abc import Mapping
from pathlib import Path

import grimp
from matplotlib.figure import Figure

FIGURE = Path(__file__).parent / "figures" / "rooms.png"


def imports() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    graph = grimp.build_graph("concord")
    rooms = {name for name in graph.find_children("concord") if graph.find_children(name)}
    found: dict[str, set[str]] = {name.partition(".")[2]: set() for name in rooms}
    for module in graph.modules:
        here = ".".join(module.split(".")[:2])
        for other in graph.find_modules_directly_imported_by(module):
            there = ".".join(other.split(".")[:2])
            if here in rooms and there in rooms and here != there:
                found[here.partition(".")[2]].add(there.partition(".")[2])
    return found


def floors(needs: Mapping[str, set[str]]) -> dict[str, int]:
    """How many rooms stand below a room, one on another."""
    found: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in found:
            found[room] = 1 + max(map(floor, needs[room]), default=-1)
        return found[room]

    for room in needs:
        floor(room)
    return found


def direct(needs: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The imports along which no longer way leads."""

    def reached(room: str) -> set[str]:
        return needs[room].union(*map(reached, needs[room]))

    ways = ((room, other) for room in needs for other in needs[room])
    return sorted((room, other) for room, other in ways if not any(other in reached(x) for x in needs[room]))


def draw() -> None:
    """Write the picture."""
    needs = imports()
    level = floors(needs)
    figure = Figure(figsize=(9, 0.75 * (1 + max(level.values()))))
    axes = figure.add_subplot()
    place = {}
    for height in sorted(set(level.values())):
        rooms = sorted(room for room in needs if level[room] == height)
        for index, room in enumerate(rooms):
            place[room] = ((index + 0.5) / len(rooms), height)
            axes.text(
                *place[room], room, ha="center", va="center", bbox={"boxstyle": "round", "fc": "#f2efe6", "ec": "#555"}
            )
    for room, other in direct(needs):
        axes.annotate(
            "",
            place[other],
            place[room],
            arrowprops={"arrowstyle": "->", "color": "#999", "shrinkA": 12, "shrinkB": 12},
        )
    axes.set(xlim=(0, 1), ylim=(-0.5, max(level.values()) + 0.5))
    axes.set_axis_off()
    figure.savefig(FIGURE, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw()
