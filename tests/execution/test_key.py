"""The key of a run: equal for runs with the same result, and it says in a line what differs."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from recorded import described
from test_options import changes
from test_table_environments import patients

from concord.cli import main
from concord.environments.table import from_table
from concord.errors import InputError, RunFailedError
from concord.execution.key import KEYS, Key, finished_run, index_run, recorded_config, require_same
from concord.execution.lifecycle import open_run, reserved_run
from concord.execution.spec import RunSpec
from concord.options import RESULT, names_of, option_values
from concord.record import RECORD, OpenRun, folder_of, read_record, require_run, write_record
from concord.training import JobFile, TrainConfig, load_job

TEXT = '''"""A job."""
import torch
from matplotlib.figure import Figure

from beside import SCALE
from pictures import WIDTH
from concord.environments import Environments
from concord.space import LogUniform, Space
from concord.training import Comparison, Job, Study

LABELS = 2

def load(name):
    return SCALE * torch.randn(8, 3), torch.arange(8) % LABELS

def environments(config):
    """Two for training."""
    return Environments(load, train=["a", "b"], test=["c"])

class Linear(torch.nn.Linear):
    bias_by_default = True

def figures(*_):
    return {"bars": Figure(figsize=(WIDTH, 1))}

rows = {"mean": {"aggregator": "mean"}}
search = Space({"lr": LogUniform(1e-3, 1.0)})
job = Job(environments, lambda config: Linear(3, LABELS), loss=torch.nn.functional.cross_entropy, figures=figures,
    comparisons={"table": Comparison(rows)}, studies={"rates": Study(search)})
'''
BESIDE, PICTURES = "SCALE = 2.0\n", "WIDTH = 1\n"
Keys = Callable[..., Key]


@pytest.fixture
def key_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """The key of the job with a change of its text, and with these modules beside it."""

    def key(before: str = "", after: str = "", **modules: str) -> Key:
        assert before in TEXT
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        texts = {"beside": BESIDE, "pictures": PICTURES, **modules, "mine": TEXT.replace(before, after, 1)}
        for name, text in texts.items():
            (folder / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.py").write_text(text)
            sys.modules.pop(name.replace("/", ".").removesuffix(".__init__"), None)
        monkeypatch.setattr(sys, "path", [each for each in sys.path if not each.startswith(str(tmp_path))])
        job = load_job(str(folder / "mine.py"))
        return RunSpec.of(job, job.job.config.resolve(), None).key

    return key


def differing(key: Key, other: Key) -> list[tuple[str, str]]:
    return [(each.part, each.name) for each in key.differences(record_of(other, TrainConfig()))]


# --- the job's text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LABELS = 2", "LABELS = 2  # a comment"),
        ("LABELS = 2", "LABELS = (\n    2\n)"),
        ('"""Two for training."""', '"""Of three."""'),
        ('    """Two for training."""\n', ""),
        ('"""A job."""', '"""Another description."""'),
        ('"aggregator": "mean"', '"aggregator": "median"'),
        ('comparisons={"table": Comparison(rows)}, ', ""),
        ("LogUniform(1e-3, 1.0)", "LogUniform(1e-2, 1.0)"),
        ('return {"bars"', 'return {"lines"'),
        ("rows = ", "def unused():\n    return LABELS + 1\n\nrows = "),
        ("import torch\n", "import json\nimport torch\n"),
        ("job = Job(", "job: Job = Job("),
    ],
)
def test_text_that_training_does_not_reach_leaves_the_key(key_of: Keys, before: str, after: str) -> None:
    assert key_of(before, after).value == key_of().value


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LABELS = 2", "LABELS = 3"),
        ("LABELS = 2", "LABELS = 2\nLABELS += 1"),
        ("LABELS = 2", "LABELS = 2\nif LABELS:\n    SCALE = 1"),
        ("torch.arange(8)", "torch.arange(9)"),
        ('train=["a", "b"]', 'train=["b", "a"]'),
        ("bias_by_default = True", "bias_by_default = False"),
        ("Linear(3, LABELS)", "Linear(3, 1 + LABELS)"),
        ("cross_entropy", "mse_loss"),
        ("figures=figures,", "figures=figures, parameter_groups=lambda model, _: [{'params': model.parameters()}],"),
    ],
)
def test_a_definition_that_training_reaches_changes_the_key(key_of: Keys, before: str, after: str) -> None:
    one, other = key_of(), key_of(before, after)
    assert one.value != other.value
    assert differing(other, one) == [("source", "mine.py")]


def test_a_module_beside_the_job_counts_if_training_reaches_it(key_of: Keys) -> None:
    key = key_of()
    assert key.value == key_of(beside=f"# Twice.\n{BESIDE}").value
    assert key.value == key_of(pictures="WIDTH = 2\n").value  # for a figure alone
    changed = key_of(beside="SCALE = 3.0\n")
    assert differing(changed, key) == [("source", "beside.py")]
    named = "from beside import SCALE"
    for how in ("from beside import *", f"{named}\nif True:\n    import beside", f"def more():\n    {named}\n{named}"):
        assert key_of(named, how).value != key_of(named, how, beside="SCALE = 3.0\n").value
    further = {"beside": "from deeper import SCALE\n"}
    assert key_of(**further, deeper="SCALE = 2.0\n").value != key_of(**further, deeper="SCALE = 3.0\n").value


def test_a_package_beside_the_job_counts_with_its_relative_imports(key_of: Keys) -> None:
    package = {
        "parts/__init__": "from . import first\n",
        "parts/first": "from .second import SCALE\n",
        "parts/second": "SCALE = 2.0\n",
    }
    change = "from beside import SCALE", "from parts.first import SCALE"
    key = key_of(*change, **package)
    assert {*key.sources} == {"mine.py", *(f"{name}.py" for name in package)}
    assert differing(key_of(*change, **package | {"parts/second": "SCALE = 3.0\n"}), key) == [
        ("source", "parts/second.py")
    ]


def test_an_installed_package_does_not_count_where_its_environment_is_beside_the_job(key_of: Keys) -> None:
    site = ".venv/lib/site-packages"
    path = f"import sys\nsys.path.insert(0, __file__.rpartition('/')[0] + '/{site}')\nimport installed\nLABELS = 2"
    key = key_of("LABELS = 2", path, **{f"{site}/installed": ""})
    assert Path(sys.modules.pop("installed").__file__ or "").parent.name == "site-packages"
    assert {*key.sources} == {"mine.py", "beside.py"}


# --- the options

JOB = load_job(str(Path(__file__).parents[1] / "jobs" / "sensors.py"))
BASE = JOB.job.config


def record_of(key: Key, config: Any = BASE) -> dict[str, Any]:
    """The record of a run with this key, after a round trip through JSON."""
    record = described(job=key.job, config=recorded_config(config.resolve()), key=key.as_json())
    found: dict[str, Any] = json.loads(json.dumps(record))
    return found


def key_with(config: TrainConfig, data: str | None = "v1", **further: Any) -> Key:
    return RunSpec.of(JOB, config.resolve(), data, **further).key


@given(changes())
def test_a_key_depends_on_every_option_that_changes_a_result_and_on_no_other(values: dict[str, Any]) -> None:
    config = BASE.with_options(**values)
    try:
        resolved = config.resolve()
    except (InputError, ValueError):
        assume(False)
    before, after = option_values(BASE.resolve()), option_values(resolved)
    result = names_of(TrainConfig, *RESULT)
    changed = {name for name in result if before[name] != after[name]}
    key, other = key_with(BASE), key_with(config)
    named = {each.name for each in other.differences(record_of(key))}
    if not changed:
        assert (other.value, named) == (key.value, set())
    if used := changed - resolved.unused():
        assert other.value != key.value
        assert used <= named
    assert named <= result | {"workers"}
    assert list(other.differences(record_of(other, config))) == []


def test_the_number_of_workers_counts_where_they_draw_the_environments() -> None:
    for options, same in ({}, True), ({"environments_per_step": 2}, False):
        one, two = (key_with(BASE.with_options(workers=workers, **options)) for workers in (1, 2))
        assert (one.value == two.value) == same


def test_a_number_is_the_same_however_it_is_written() -> None:
    assert key_with(BASE.with_options(lr=1)).value == key_with(BASE.with_options(lr=1.0)).value


def test_a_rule_that_ends_a_run_early_is_a_part_of_its_key() -> None:
    early = key_with(BASE, stop_when="loss < 1")
    assert early.value != key_with(BASE).value == key_with(BASE, stop_when="").value


@dataclass(frozen=True, kw_only=True)
class Later(TrainConfig):
    """Of a later version than the one that began the run."""

    widths: tuple[int, ...] = field(default_factory=lambda: (8, 8))
    table: Path | None = Path("table.csv")


def later(**options: Any) -> RunSpec:
    job = JobFile(replace(JOB.job, config=Later()), JOB.path, JOB.source)
    return RunSpec.of(job, Later().with_options(**options).resolve(), None)


def test_an_option_newer_than_a_run_had_its_default_there(output: Path) -> None:
    before = RunSpec.of(JOB, TrainConfig().with_options(output=output, name="a").resolve(), None)
    with reserved_run(before) as reserved, open_run(reserved, before.record(reserved.store), lambda _: None) as run:
        run_id = run.run.run_id
    now = {"output": output, "name": "a", "resume": True}
    goes_on = later(**now)
    assert goes_on.key.value == before.key.value
    with reserved_run(goes_on) as reserved, open_run(reserved, {}, lambda _: None) as run:
        assert (run.resumed, run.run.run_id) == (True, run_id)
    for name, value, shown in ("widths", (4,), "4"), ("table", Path("b.csv"), "b.csv"):
        refused = later(**now, **{name: value})
        assert refused.key.value != before.key.value
        with pytest.raises(InputError, match=f"^--{name} {shown}: the run a was started with "), reserved_run(refused):
            pass


# --- the data


def test_other_data_change_the_key_and_unknown_data_are_not_held_against_a_run(tmp_path: Path) -> None:
    one, other, unknown = key_with(BASE), key_with(BASE, "v2"), key_with(BASE, None)
    assert len({one.value, other.value, unknown.value}) == 3
    assert len({each.without_data for each in (one, other, unknown)}) == 1
    assert [(each.part, each.current, each.recorded) for each in other.differences(record_of(one))] == [
        ("data", "v2", "v1")
    ]
    for key, recorded in (unknown, one), (one, unknown):  # they have moved to an address, or an earlier run had none
        assert not list(key.differences(record_of(recorded)))
    folders = [key_with(BASE.with_options(data=tmp_path / name), None).value for name in "aab"]
    assert folders[0] == folders[1] != folders[2]


def test_a_run_resumes_on_the_data_of_its_beginning_alone(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a table with a renamed level the encoder, fitted again, would give the checkpoint other levels."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    file, before = tmp_path / "patients.csv", patients()
    before.to_csv(file, index=False)
    words = ["train", "table", "--data", str(file), "--environment", "hospital", "--target", "died"]
    words += ["--output", str(output), "--name", "a", "--epochs", "2", "--no-register"]
    with monkeypatch.context() as patch:
        patch.setattr("concord.execution.run.remove_older", interrupted)  # after the first checkpoint
        assert main(words) == 1

    folder = folder_of(output, "a")
    record, kept = read_record(folder), (folder.path / RECORD).read_bytes()
    assert record is not None
    began = from_table(file, environment="hospital", target="died").version
    assert record["key"]["data"] == began
    before.replace("typical", "usual").to_csv(file, index=False)
    now = from_table(file, environment="hospital", target="died").version
    capsys.readouterr()
    assert main([*words, "--resume"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"concord: --name a: the run a was started with data of version {began}, and these have version {now}; restore "
        "the data, or give another name without --resume"
    )
    assert (folder.path / RECORD).read_bytes() == kept

    before.to_csv(file, index=False)
    assert main([*words, "--resume"]) == 0


# --- what differs, and what is the same


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"job": "another"}, "--name a: is a run of job another, not of sensors"),
        ({"config": {"lr": 0.5}}, "--lr 0.1: the run a was started with 0.5; a resumed run keeps its options"),
        ({"config": {"seed": 3}}, "--seed 0: the run a was started with 3; a resumed run keeps its options"),
        ({"config": {"milestones": [0.5]}}, "--milestones 0.5 0.75: the run a was started with 0.5; a resumed run "),
        ({"config": {"lr": "***"}}, "--lr 0.1: the run a was started with ***; a resumed run keeps its options, and"),
        ({"key": {"data": "v0"}}, "--name a: the run a was started with data of version v0, and these have version v1"),
        ({"key": {"sources": {"rule.py": "1"}}, "sources": ["rule.py"]}, "rule.py: the run a was started with ano"),
    ],
)
def test_what_differs_is_named_in_one_line(change: dict[str, Any], line: str) -> None:
    key = key_with(BASE)
    record = record_of(key)
    changed = {name: {**record[name], **each} if isinstance(each, dict) else each for name, each in change.items()}
    with pytest.raises(InputError) as refused:
        require_same("the run a", key, record | changed, "a", "a resumed run keeps its options")
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)
    assert require_same("the run a", key, record, "a", "")


def test_a_run_whose_text_changed_goes_on_with_a_warning_and_is_nobodys_result(output: Path) -> None:
    lines: list[str] = []
    changed = replace(JOB, source=JOB.source.replace("0.0, 1.0", "0.0, 2.0") + "\nthreshold = 1\nprint\n")
    options = BASE.with_options(output=output, name="a").resolve()
    first, then = RunSpec.of(JOB, options, "v"), RunSpec.of(changed, options.with_options(resume=True), "v")
    assert first.key.value != then.key.value
    with (
        pytest.raises(RunFailedError),
        reserved_run(first) as reserved,
        open_run(reserved, first.record(reserved.store), lines.append),
    ):
        raise RunFailedError("for a test")
    with reserved_run(then) as reserved, open_run(reserved, {}, lines.append):
        pass
    warning = "warning: the job's file has changed since the run began; what it learned with the earlier text is kept"
    assert lines == [warning]
    assert require_run(folder_of(output, "a")).status == "FINISHED"
    assert [finished_run(output, each.key) for each in (first, then)] == [None, None]


def kept_run(output: Path, key: Key, *ends: str) -> OpenRun:
    """A run of this key in the output folder, with its index."""
    folder = folder_of(output, "a")
    folder.make()
    run = OpenRun(folder, write_record(folder, "run", record_of(key)))
    for status in ends:
        run.append("began", resumed=False)
        if status:
            run.append("ended", status=status)
    index_run(run)
    return run


def test_a_finished_run_is_found_by_its_key_and_no_other_is(output: Path) -> None:
    key = key_with(BASE)
    kept_run(output, key, "FAILED", "FINISHED")
    found = finished_run(output, key_with(BASE.with_options(readers=2, name="b")))
    assert found is not None
    assert (found.name, found.key) == ("a", key.value)
    others = [key_with(BASE, "v2"), key_with(BASE, None), key_with(BASE.with_options(seed=1))]
    assert [finished_run(output, each) for each in others] == [None] * 3
    assert finished_run(output / "elsewhere", key) is None


@pytest.mark.parametrize("ends", [["FINISHED", ""], ["KILLED"], ["FAILED"], []])
def test_a_run_that_has_not_finished_answers_for_no_key(output: Path, ends: list[str]) -> None:
    kept_run(output, key_with(BASE), *ends)
    assert finished_run(output, key_with(BASE)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"key": {}},
        {"config": {**recorded_config(BASE.resolve()), "lr": 7.0}},  # the index is of another run of this name
        None,
    ],
)
def test_the_record_counts_and_not_the_index(output: Path, change: dict[str, Any] | None) -> None:
    key = key_with(BASE)
    file = kept_run(output, key, "FINISHED").folder.path / RECORD
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert finished_run(output, key) is None
    assert (output / KEYS / key.value).exists()
