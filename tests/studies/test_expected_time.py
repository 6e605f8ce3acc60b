"""A comparison that takes long is asked about; where nobody can be asked it is refused, with the option to allow it."""

import io
from pathlib import Path
from typing import Any

import pytest

from concord.cli.job_options import read_command
from concord.errors import InputError, RunFailedError
from concord.execution.execute import only_process
from concord.studies import expected_time
from concord.studies.comparison_run import run_comparison
from concord.studies.expected_time import BESIDE_STEPS, require_time
from concord.studies.leave_one_out import plan_leave_one_out
from concord.studies.methods import plan_methods, run_methods
from concord.training import load_job
from concord.training.loop import estimated_seconds
from concord.training.options import ResolvedTrainConfig

TINY = str(Path(__file__).parents[1] / "jobs" / "tiny_study.py")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def ten_minutes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_time, "estimated_seconds", lambda *_: (600.0 - BESIDE_STEPS, 600.0 - BESIDE_STEPS))


def announced(left: int, hours: float, first_look: str = "") -> list[str]:
    job, lines = load_job(TINY), list[str]()
    config = job.job.config.with_options(device="cpu").resolve()
    assert isinstance(config, ResolvedTrainConfig)
    require_time(job, config, left, f"{left} trainings", 2, hours, lines.append, first_look)
    return lines


@pytest.mark.usefixtures("ten_minutes_each")
@pytest.mark.parametrize(("left", "hours", "lines"), [(12, 1.0, 1), (0, 1.0, 1), (120, 10.0, 1)])
def test_what_is_expected_within_the_hours_begins_at_once(left: int, hours: float, lines: int) -> None:
    assert len(announced(left, hours)) == lines


@pytest.mark.usefixtures("ten_minutes_each")
def test_without_a_terminal_a_long_comparison_is_refused_with_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    with pytest.raises(InputError) as refused:
        announced(120, 1.0)
    assert str(refused.value) == (
        "--hours 1: 120 trainings, 2 at a time are expected to take about 10.0 h; give --hours 15, or fewer methods, "
        "seeds or folds"
    )


@pytest.mark.usefixtures("ten_minutes_each")
@pytest.mark.parametrize(
    ("left", "first_look", "hint"), [(4, "--seeds 1", True), (4, "", False), (2, "--seeds 1", False)]
)
def test_what_takes_more_than_ten_minutes_ends_with_the_options_for_a_first_look(
    left: int, first_look: str, hint: bool
) -> None:
    (line,) = announced(left, 1.0, first_look)
    assert line.endswith("comes on top; for a first look: --seeds 1" if hint else "comes on top")


def test_many_short_trainings_take_their_time_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_time, "estimated_seconds", lambda *_: (0.01, 0.01))
    (line,) = announced(100, 1.0)
    assert "about 36 s;" in line


def test_patience_gives_a_range_whose_shortest_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_time, "estimated_seconds", lambda *_: (60.0 - BESIDE_STEPS, 600.0 - BESIDE_STEPS))
    (line,) = announced(120, 1.0)
    assert "60 min to 10.0 h, as patience ends each training" in line
    with pytest.raises(InputError, match=r"--hours 0\.9: .* 60 min to 10\.0 h"):
        announced(120, 0.9)


@pytest.mark.parametrize(("evaluations", "patience", "share"), [(8, 3, 0.5), (8, 0, 1.0), (2, 3, 1.0)])
def test_a_training_that_ends_with_its_patience_takes_its_share(evaluations: int, patience: int, share: float) -> None:
    job = load_job(TINY)
    changes = {"epochs": 8, "evaluations": evaluations, "patience": patience, "checkpoints": 1, "keep": "least-loss"}
    config = job.job.config.with_options(device="cpu", **changes).resolve()
    assert isinstance(config, ResolvedTrainConfig)
    shortest, longest = estimated_seconds(job.job, config, only_process(config))
    assert shortest == pytest.approx(share * longest)


@pytest.mark.usefixtures("ten_minutes_each")
@pytest.mark.parametrize(("answer", "begins"), [("y\n", True), ("yes\n", True), ("no\n", False), ("", False)])
def test_on_a_terminal_the_user_decides(monkeypatch: pytest.MonkeyPatch, answer: str, begins: bool) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    if begins:
        assert announced(120, 1.0)[-1].endswith("go on? yes or no")
        return
    with pytest.raises(RunFailedError, match="nothing was trained"):
        announced(120, 1.0)


@pytest.mark.parametrize("table", ["leave-one-out", "methods"])
def test_a_refused_comparison_leaves_nothing_behind(
    ray_cluster: None, ten_minutes_each: None, tmp_path: Path, table: str
) -> None:
    words = [table, "--methods", "erm", "and-mask", "--hours", "0.01", "--epochs", "1", "--output", str(tmp_path)]
    command = read_command("compare", load_job(TINY), words, "concord compare")
    asked: Any = (command.job, command.options, command.given)

    def begin() -> Any:
        if table == "methods":
            return run_methods(plan_methods(*asked), {}, lambda _: None)
        return run_comparison(plan_leave_one_out(*asked), lambda _: None)

    with pytest.raises(InputError, match=r"--hours 0\.01: "):
        begin()
    assert list(tmp_path.glob("*/*")) == []
