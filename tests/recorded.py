"""What a training loop tells its recorder, what runs and groups record, and metrics without the machine's speed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from concord.record import Kind, OpenRun, Run, folder_of, write_record
from concord.training.context import Silent


class Kept(Silent):
    """Keeps the metrics of steps, and in a folder every checkpoint."""

    def __init__(self, folder: Path | None = None) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.folder = folder
        self.checkpoints: list[Path] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        if self.folder is not None:
            self.checkpoints.append(self.folder / f"checkpoint-{len(self.checkpoints)}")
            self.checkpoints[-1].mkdir(parents=True)
            write(self.checkpoints[-1])


def described(kind: Kind = "run", **fields: Any) -> dict[str, Any]:
    """A whole record, with these fields."""
    record: dict[str, Any] = {
        "job": "mine",
        "config": {},
        "store": "",
        "key": {},
        "tracking": {"experiment": "tests", "parameters": {}, "tags": {}},
    }
    if kind == "study":
        record |= {
            "deciding": {"search": "tpe", "stop_when": ""},
            "own": None,
            "criterion": {"selection": "held-out", "metric": "held_out_accuracy", "mode": "max"},
            "measure": "accuracy",
            "modes": {},
            "method": "plain",
            "space": {},
            "oracle": None,
            "validation": False,
            "options": {"top": 2},
            "given": [],
            "started": 0.0,
        }
    return record | fields


def report_of(run: Run) -> Mapping[str, Any]:
    """The result of a finished run, as ``concord train --json`` has it."""
    assert run.report is not None
    return run.report


def record_run(group: OpenRun, metrics: Mapping[str, float] | None, **place: Any) -> str:
    """Record a run that a group asked for, with its metrics at its end; None if it failed. Returns its name."""
    if place["kind"] != "cell":
        place = {"point": {}, **place}
    words = [group.name, *(f"{name}-{place[name]}" for name in ("kind", "trial", "seed", "left_out") if name in place)]
    folder = folder_of(group.folder.place.parent.parent, "-".join(words))
    key = {"key": f"{place}"}
    group.append("asked", run=folder.place.name, key=key["key"], **place)
    run = OpenRun(folder, write_record(folder, "run", described(group=group.name, key=key)))
    run.append("began", resumed=False)
    if metrics is not None:
        run.append("evaluated", epoch=1, step=1, metrics=dict(metrics))
    run.append(
        "ended",
        **({"status": "FINISHED"} if metrics is not None else {"status": "FAILED", "failure": "ValueError: no"}),
    )
    run.close()
    return run.name


def without_time(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "steps_per_second"}


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a trial reports and that do not depend on the machine's speed."""
    return {name: value for name, value in without_time(metrics).items() if "/" not in name}
