"""What Ray says of itself goes to a file, and a node that is lost is named."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private import worker as ray_worker

from concord.execution.local_ray import lines_chosen
from concord.execution.ray_messages import _Messages, is_own, lost

WORKER, PROCESS = "RayTrainWorker", "4711"
OF_RAY = [
    ("TrainController", "[2026-11-29 12:36:24,401 E 17345 17423] core_worker.cc:2465: Actor with class name: 'Preempt"),
    ("RayTrainWorker", "[2026-11-29 12:36:24,401 E 17345 17423] core_worker.cc:2465: Actor with class name: 'Preempt"),
    ("PlacementGroupCleaner", "PlacementGroupCleaner started"),
    ("RayTrainWorker", "[W1129 12:36:24.123456789 socket.cpp:767] [c10d] The client socket cannot be initialized to"),
]


@pytest.mark.parametrize(("actor", "line"), OF_RAY)
def test_a_line_of_ray_itself_is_told_by_its_process_or_its_form(actor: str, line: str) -> None:
    assert is_own(PROCESS, actor, line)
    assert is_own("raylet", "", "anything of a state dump")


@pytest.mark.parametrize("line", ["epoch 1", "[2026] a user's own", "Traceback (most recent call last):", ""])
def test_a_line_of_a_worker_is_the_user_s(line: str) -> None:
    assert not is_own(PROCESS, WORKER, line)


def test_a_worker_that_was_killed_for_memory_stays_known() -> None:
    line = "[2026-11-29 12:36:24,401 E 1 2] node_manager.cc:3: 1 Workers killed due to memory pressure (OOM)"
    assert not is_own("raylet", "", line)


@given(st.lists(st.sampled_from(["mine", "\x1b[1mbold\x1b[0m", OF_RAY[1][1], OF_RAY[3][1]])))
def test_every_line_is_shown_or_kept_in_order_and_without_colours(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    file = tmp_path_factory.mktemp("logs") / "ray.log"
    batch = {"pid": PROCESS, "actor_name": WORKER, "ip": "1.2.3.4", "lines": lines}
    shown = _Messages(lambda: file)(batch)["lines"]
    kept = file.read_text().splitlines() if file.exists() else []
    assert shown == [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in lines if line[0] in "m\x1b"]
    assert kept == [f"(RayTrainWorker 4711 1.2.3.4) {line}" for line in lines if line[0] == "["]


def test_where_ray_s_folder_cannot_be_written_its_lines_are_shown(tmp_path: Path) -> None:
    batch = {"pid": PROCESS, "actor_name": WORKER, "lines": ["mine", OF_RAY[1][1]]}
    assert _Messages(lambda: tmp_path / "none" / "ray.log")(batch)["lines"] == batch["lines"]
    assert _Messages(lambda: None)(batch)["lines"] == batch["lines"]


def test_a_message_that_a_raylet_sends_is_kept_like_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ray.log"
    # The suite's own session chooses lines, too.
    monkeypatch.setattr(ray_worker, "print_worker_logs", inspect.unwrap(ray_worker.print_worker_logs))
    with lines_chosen(_Messages(lambda: file)):
        # As Ray's thread for such messages does: they reach no handler of lines.
        for process, line in (("raylet", "WARNING: 9 PYTHON worker processes have been started"), (PROCESS, "mine")):
            ray_worker.print_to_stdstream({"lines": [line], "pid": process, "is_err": False}, ignore_prefix=False)
    ray_worker.print_to_stdstream({"lines": ["again as before"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    shown = "".join(capsys.readouterr())
    assert ("mine" in shown, "PYTHON" in shown, "again as before" in shown) == (True, False, True)
    assert "WARNING: 9 PYTHON worker processes" in file.read_text()


def test_a_node_is_lost_once() -> None:
    def nodes(*alive: str) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.1", "Alive": name in alive}
            for name in "abc"
        ]

    names = dict[str, str]()
    assert [lost(names, nodes(*alive)) for alive in ("ab", "abc", "a", "a", "ac")] == [
        [],
        [],
        ["b (10.0.0.1)", "c (10.0.0.1)"],
        [],
        [],
    ]
