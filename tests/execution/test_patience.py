"""Waits for a server or a storage: how long, and what is told."""

import itertools

import pytest

from concord.errors import UnansweredError
from concord.execution import patience
from concord.execution.patience import wait_for_answer


class Clock:
    """Time that passes only where somebody sleeps, or works."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    return clock


@pytest.mark.parametrize(("minutes", "answers"), [(1.0, True), (0.5, False), (0.0, False)])
def test_patience_counts_from_the_first_failure(
    clock: Clock, capsys: pytest.CaptureFixture[str], minutes: float, answers: bool
) -> None:
    tries = itertools.count()

    def ask() -> str:
        if next(tries) == 0:
            clock.sleep(120.0)  # work before the question
        if clock.now < 1000.0 + 120.0 + 45.0:
            raise UnansweredError("away")
        return "answer"

    if answers:
        assert wait_for_answer(ask, minutes) == "answer"
    else:
        with pytest.raises(UnansweredError, match="away"):
            wait_for_answer(ask, minutes)
    said = capsys.readouterr().err
    line = f"away; an answer is waited for, for up to {minutes:g} minutes (--tracking-patience)\n"
    assert said == (line if minutes else "")
    assert clock.now <= 1000.0 + 120.0 + 60.0
