"""Any JSON value in place of any field of what Concord has recorded is used, or refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged import changed, damage
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import described

from concord.environments import sharded
from concord.environments.sharded import MANIFEST, ShardedData
from concord.errors import InputError
from concord.execution.key import KEYS, finished_run, index_run, plain
from concord.execution.restored_options import restored_config
from concord.record import EVENTS, RECORD, OpenRun, folder_of, read_events, require_run, write_record
from concord.storage import Folder, append_line, json_line, read_lines
from concord.storage.typed_json import Count, read_json
from concord.studies.plan import StudyPlan, plan_study
from concord.studies.results import ResultLine, read_study
from concord.studies.study_options import options_for
from concord.tracking import Store
from concord.training import load_job

JOB = load_job(str(Path(__file__).parents[1] / "jobs" / "tiny_study.py"))


def used_or_refused(use: Callable[[], object], file: Path) -> None:
    """Use what was damaged: it works, or the line names the file."""
    try:
        use()
    except InputError as refused:
        line = str(refused)
        assert "\n" not in line
        assert file.name in line or f" {file.parent.name}" in line or str(file.parent) in line, line  # or what it is of


def planned(output: Path) -> StudyPlan:
    options = options_for(JOB.job.config).with_options(
        name="s", output=output, method="averaged", trials=3, reruns=0, shortlist=0
    )
    return plan_study(JOB, options, {"name", "output", "method", "trials", "reruns", "shortlist"})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with a study of two trials, as its processes record them."""
    output = tmp_path_factory.mktemp("study")
    plan, store = planned(output), Store(f"sqlite:///{output}/mlflow.db", output)  # records name it; none opens it
    plan.folder.make()
    group = OpenRun(plan.folder, write_record(plan.folder, "study", plan.record(store)))
    for number, rate in enumerate((0.1, 0.01)):
        (trial,) = plan.parts("trial", number, {"lr": rate})
        group.append("asked", **plain({"run": trial.name, "key": trial.key.value, **trial.place}))
        folder = folder_of(output, str(trial.name))
        folder.make()
        run = OpenRun(folder, write_record(folder, "run", {**trial.record(store), "group": "s", "run_id": "0" * 32}))
        part = {"name": "a", "purpose": "train", "examples": 60, "leaves": [["inputs", [4], "float32"]], "digest": "0"}
        run.append("began", resumed=False)
        run.append("data", parts=[part])
        run.append("metrics", step=1, metrics={"step/loss": 0.7})
        run.append("evaluated", epoch=2, step=6, metrics={"held_out_accuracy": rate, "held_out_loss": 0.5})
        run.append("checkpoint", name="checkpoint_000000000006", step=6)
        run.append("ended", status="FINISHED")
        index_run(run)
        run.close()
    group.close()
    return output


@pytest.mark.parametrize("file", [f"studies/s/{RECORD}", f"studies/s/{EVENTS}", f"runs/s-trial-0/{RECORD}"])
def test_any_value_in_a_study_is_used_or_refused_in_a_line(study: Path, file: str) -> None:
    before = (study / file).read_bytes()

    @settings(max_examples=80, deadline=None)
    @given(st.data())
    def any_value(data: st.DataObject) -> None:
        (study / file).write_bytes(before)
        damage(study / file, data)

        def read() -> None:
            result = read_study(folder_of(study, "s", "study"))
            if result.finished:
                result.as_json(), result.files(), [str(part) for part in result.output()]

        used_or_refused(read, study / file)
        if file == f"studies/s/{RECORD}":  # all that a plan reads
            used_or_refused(lambda: planned(study), study / file)

    try:
        any_value()
    finally:
        (study / file).write_bytes(before)


@pytest.mark.parametrize("file", [RECORD, EVENTS])
def test_any_value_in_a_run_is_used_or_refused_in_a_line(study: Path, file: str) -> None:
    path = study / "runs" / "s-trial-1" / file
    before = path.read_bytes()
    key = planned(study).parts("trial", 1, {"lr": 0.01})[0].key

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def any_value(data: st.DataObject) -> None:
        path.write_bytes(before)
        damage(path, data)

        def read() -> None:
            run = require_run(folder_of(study, "s-trial-1"))
            _ = run.key, run.options, run.history, run.metrics, run.status, run.report, run.seconds, run.ended_at
            [*key.differences(run.record)]
            restored_config(JOB.job.config, run.record["config"])

        used_or_refused(read, path)
        finished_run(study, key)  # a damaged one is trained again

    try:
        any_value()
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a/../b", b"\x00", b"", b"x" * 5000, b"../studies/s"])
def test_an_index_of_nonsense_is_as_none(study: Path, content: bytes) -> None:
    key = planned(study).parts("trial", 1, {"lr": 0.01})[0].key
    file = study / KEYS / key.value
    before = file.read_bytes()
    assert finished_run(study, key) is not None
    file.write_bytes(content)
    assert finished_run(study, key) is None
    file.unlink()
    file.mkdir()
    assert finished_run(study, key) is None
    shutil.rmtree(file)
    file.write_bytes(before)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("point", {"lr": 0.5}, "asks for the run s-trial-0 with lr 0.5, and .*record.json has lr 0.1"),
        ("resolved", {"seed": 9}, "with seed 9, and .*record.json has seed 0"),
        ("left_out", "a", "with leave_out a, and .*record.json has leave_out None"),
    ],
)
def test_a_request_that_its_run_contradicts_is_refused(
    study: Path, tmp_path: Path, field: str, value: Any, line: str
) -> None:
    output = tmp_path / "copy"
    shutil.copytree(study, output)
    events = output / "studies" / "s" / EVENTS
    first, *others = [json.loads(each) for each in events.read_text().splitlines()]
    events.write_bytes(b"".join(map(json_line, [{**first, field: value}, *others])))
    with pytest.raises(InputError, match=line):
        read_study(folder_of(output, "s", "study"))


@pytest.mark.parametrize("field", ["point", "resolved"])
@pytest.mark.parametrize("value", [{"lr": {}}, {"": {}}, {"lr": [{"a": 1}]}, {"lr": [[{}]]}])
def test_an_option_of_a_trial_is_no_object(study: Path, tmp_path: Path, field: str, value: Any) -> None:
    output = tmp_path / "copy"
    shutil.copytree(study, output)
    events = output / "studies" / "s" / EVENTS
    first, *others = [json.loads(each) for each in events.read_text().splitlines()]
    events.write_bytes(b"".join(map(json_line, [{**first, field: value}, *others])))
    with pytest.raises(InputError, match=rf"events\.jsonl: line 1 is not an event.*{field}"):
        read_study(folder_of(output, "s", "study"))


def test_a_run_of_another_group_is_taken_by_its_key_alone(study: Path, tmp_path: Path) -> None:
    output = tmp_path / "copy"
    shutil.copytree(study, output)
    record = output / "runs" / "s-trial-0" / RECORD
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "group": "other"}))
    assert len(read_study(folder_of(output, "s", "study")).finished) == 2
    record.write_text(json.dumps({**content, "group": "other", "key": {**content["key"], "key": "another"}}))
    with pytest.raises(InputError, match=r"asks for the run s-trial-0 of key \w+, and .* has key another; restore"):
        read_study(folder_of(output, "s", "study"))


def test_any_value_in_a_manifest_is_used_or_refused_in_a_line(tmp_path: Path) -> None:
    group = {"rows": 3, "facts": {"seed": 1}, "digest": "ab"}
    shard = {"file": "a.parquet", "sha256": "0", "split": "train", "groups": [group]}
    manifest = {"format": sharded.FORMAT, "data": "d", "options": {"n": 1}, "files": 1, "shards": [shard]}
    (tmp_path / "a.parquet").touch()

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def any_value(data: st.DataObject) -> None:
        (tmp_path / MANIFEST).write_text(json.dumps(changed(manifest, data)))
        used_or_refused(lambda: [*map(str, ShardedData(tmp_path, "d").groups("train"))], tmp_path / MANIFEST)

    any_value()


def test_any_value_in_a_line_of_results_is_used_or_refused_in_a_line(tmp_path: Path) -> None:
    line = {"configuration": "mean", "seed": 1, "values": {"test": 0.5}, "seconds": 1.0, "machine": "m"}
    file = tmp_path / "results.jsonl"

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def any_value(data: st.DataObject) -> None:
        file.write_bytes(json_line(line) + json_line(changed(line, data)))
        used_or_refused(lambda: [each.as_json() for each in ResultLine.read_all(file)], file)

    any_value()


def test_a_cursor_of_nonsense_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "events.sent"
    for value in ("text", -1, 2.5, None, [3], True, 2**63, 7):
        append_line(file, value)
    assert [*read_lines(file, Count)] == [7]


def test_nesting_without_end_and_numbers_without_end_are_refused_in_a_line(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    whole = json.dumps(described() | {"version": 2, "kind": "run"})
    for text in ("[" * 100_000, '{"a":' * 100_000, whole.replace('"config": {}', '"config": ' + "[" * 5000)):
        (tmp_path / RECORD).write_text(text)
        with pytest.raises(InputError, match=r"record\.json cannot be read"):
            require_run(folder)
        (tmp_path / EVENTS).write_text(text + "\n")
        with pytest.raises(InputError, match=r"events\.jsonl: line 1 is not an event"):
            [*read_events(tmp_path / EVENTS)]
    with pytest.raises(ValueError, match="the whole: should be a valid number"):
        read_json("1" + "0" * 400, float)
