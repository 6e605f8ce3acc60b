"""Who waits for the head node's memory sees the position and the reason."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concord.errors import InputError
from concord.execution.submission.admission import Submission, check_memory, wait_for_admission, with_waits

GIB = 2**30


def submission(number: int, status: str, memory: int) -> Submission:
    return Submission(str(number), status, "train", "job", "", "ann", number, None, None, "", "", memory=memory)


@given(
    st.lists(st.tuples(st.sampled_from(["pending", "running", "succeeded"]), st.integers(0, 3)), max_size=12),
    st.integers(0, 8),
)
def test_what_does_not_fit_waits_in_the_order_of_submission(told: Sequence[tuple[str, int]], head: int) -> None:
    found = with_waits([submission(at, status, memory * GIB) for at, (status, memory) in enumerate(told)], head * GIB)
    assert [int(each.id) for each in found] == [*reversed(range(len(told)))]
    waiting = [each for each in reversed(found) if each.waits]
    assert [each.waits.split(" for ")[0] for each in waiting] == [
        f"{place} of {len(waiting)}" for place in range(1, len(waiting) + 1)
    ]
    assert all(each.status == "pending" for each in waiting)
    starting = [each for each in found if each.status == "pending" and not each.waits]
    running = sum(each.memory for each in found if each.status == "running")
    assert not starting or running + sum(each.memory for each in starting) <= head * GIB
    assert not waiting or all(int(each.id) < int(waiting[0].id) for each in starting)


def test_the_reason_says_what_is_reserved() -> None:
    found = with_waits([submission(0, "running", 2 * GIB), submission(1, "pending", 2 * GIB)], 3 * GIB)
    assert found[0].waits == "1 of 1 for 2 GiB of the head node, of which 2 of 3 GiB are reserved by 1 running"


def test_more_than_the_head_node_has_is_refused() -> None:
    check_memory(3 * GIB, 3 * GIB)
    with pytest.raises(InputError) as refused:
        check_memory(4 * GIB, 3 * GIB)
    assert str(refused.value) == "--driver-memory 4: the head node has 3 GiB for commands; give less"
    with pytest.raises(InputError, match="--driver-memory 20480: the head node has 1536 GiB for commands; give less"):
        check_memory(20480 * GIB, 1536 * GIB)


def test_a_change_of_position_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concord.execution.submission.admission._FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("concord.execution.submission.admission._STARTING_SECONDS", -1.0)

    class Cluster:
        looks = 0

        def status(self, _: str) -> str:
            self.looks += 1
            return "pending" if self.looks < 6 else "running"

        def submissions(self) -> list[Submission]:
            others = [submission(0, "running", 2 * GIB), submission(1, "pending", 2 * GIB)]
            return with_waits([*others[self.looks // 4 :], submission(2, "pending", 3 * GIB)], 2 * GIB)

    lines: list[str] = []
    wait_for_admission(Cluster(), "2", lines.append)
    assert [line.split(" for ")[0] for line in lines] == ["2: waits as 2 of 2", "2: waits as 1 of 1"]
