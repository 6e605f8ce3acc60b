"""Every write of a run, a study and a comparison fails, or is the last before a kill; nothing is lost.

Each write has one of the faults, in turn: ``pytest -m slow tests/storage/test_faults.py``; with CONCORD_TEST_ALL_FAULTS
each has all of them, which takes hours. CONCORD_TEST_EVERY=9 tries each ninth write. ``-s`` prints what came of each.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from faulty_commands import FAULTS, Ended, FaultyCommands, faulty_commands
from recorded import without_time

from concord.execution.execute import CHECKPOINTS, kept_checkpoint
from concord.record import FOLDERS, Kind, folder_of, read_run
from concord.training.checkpoint import MODEL

JOBS = Path(__file__).parents[1] / "jobs"
RUN = (str(JOBS / "tiny_study.py"), "--no-register", "--evaluations", "2", "--checkpoints", "2")
STUDY = (
    *(str(JOBS / "tiny_study.py"), "--method", "averaged", "--trials", "3", "--concurrent", "1", "--no-register"),
    *("--reruns", "1", "--shortlist", "0"),
)
COMPARISON = (str(JOBS / "tiny_compared.py"), "masks", "--concurrent", "1")
COMMANDS: Mapping[Kind, tuple[str, ...]] = {
    "run": ("train", *RUN, "--name", "f"),
    "study": ("tune", *STUDY, "--name", "f"),
    "comparison": ("compare", *COMPARISON, "--name", "f"),
}


def results(output: Path) -> dict[str, Any]:
    """All that training left in an output folder: evaluations and weights by run, without times."""
    found: dict[str, Any] = {}
    for folder in sorted((output / FOLDERS["run"]).iterdir()):
        run = read_run(folder_of(output, folder.name))
        assert run is not None
        weights = kept_checkpoint(run)
        found[run.name] = (
            run.status,
            {moment: without_time(metrics) for moment, metrics in run.evaluations.items()},
            weights and (folder / CHECKPOINTS / weights / MODEL).read_bytes(),
        )
    return found


def problem(ended: Ended, output: Path, fault: str) -> str | None:
    """What is wrong with the end of a command that had a fault."""
    said = ended.output + ended.error
    if "Traceback" in said:
        return "traceback"
    if fault == "kill":
        return None if ended.status == -9 else f"status {ended.status} after a kill"
    if ended.status == 0:
        return None
    last = ended.error.rstrip().splitlines()[-1]
    if ended.status not in (1, 2) or not last.startswith("concord: "):
        return f"status {ended.status}, {last}"
    return None if str(output) in last else f"no file in: {last}"


def again(commands: FaultyCommands, kind: Kind, output: Path) -> Ended:
    """The command that continues, or the same one if nothing began."""
    more = ["--resume"] if kind == "run" and read_run(folder_of(output, "f")) is not None else []
    return commands.run(output, *COMMANDS[kind], "--output", str(output), *more)


def case(commands: FaultyCommands, kind: Kind, folder: Path, at: int, fault: str, right: Any) -> tuple[str, str | None]:
    """The write that had the fault, and what went wrong."""
    output = folder / f"{kind}-{at}-{fault}" / "out"
    ended = commands.run(output, *COMMANDS[kind], "--output", str(output), at=at, fault=FAULTS[fault])
    if len(ended.writes) < at:
        return "", None
    write = re.sub(r"\d{6,}|[0-9a-f]{20,}|tmp\w+", "…", ended.writes[at - 1].replace(f"{output}/", ""))
    wrong = problem(ended, output, fault)
    if wrong is None:
        second = again(commands, kind, output)
        if second.status != 0:
            wrong = f"again: status {second.status}, {(second.error.strip().splitlines() or [''])[-1]}"
        elif results(output) != right:
            wrong = "another result"
    if wrong is None:
        shutil.rmtree(output.parent)
    return write, wrong


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCommands]:
    with faulty_commands(tmp_path_factory.mktemp("commands")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "study", "comparison"])
def test_a_fault_in_any_write_is_one_line_and_loses_nothing(
    commands: FaultyCommands, tmp_path: Path, kind: Kind
) -> None:
    whole = tmp_path / "whole" / "out"
    undisturbed = commands.run(whole, *COMMANDS[kind], "--output", str(whole))
    assert undisturbed.status == 0, undisturbed.error
    right = results(whole)
    count, wrong = Counter[str](), list[str]()
    every = int(os.environ.get("CONCORD_TEST_EVERY", "1"))
    for turn, at in enumerate(range(1, len(undisturbed.writes) + 1, every)):
        first = turn % len(FAULTS)  # each write has another fault, unless all are asked for
        for fault in [*FAULTS] if "CONCORD_TEST_ALL_FAULTS" in os.environ else [[*FAULTS][first]]:
            write, why = case(commands, kind, tmp_path, at, fault, right)
            count[fault] += 1
            print(f"{kind} {fault} {at} {write}: {why or 'right'}", flush=True)
            if why is not None:
                wrong.append(f"{kind} {fault} {at} {write}: {why}")
    print(kind, dict(count), f"{len(wrong)} wrong", flush=True)
    assert not wrong
