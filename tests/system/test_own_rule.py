"""A user's rule on the command line: its fields are options, and its source is kept with the run."""

import dataclasses
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_readme import snippet
from tracked import tracked_runs

from concord.aggregation import AndMask, Mean, aggregate
from concord.cli import main
from concord.cli.job_options import early_values, read_command, with_canonical_rule
from concord.cli.parsing import job_and_words, parse
from concord.cli.submit import check_command
from concord.errors import InputError
from concord.execution.key import recorded_config
from concord.execution.run import run
from concord.execution.submission.package import inside
from concord.interface import command_options
from concord.options import option_values
from concord.record import EVENTS, folder_of, require_run
from concord.space import Choice, Uniform
from concord.storage import append_line
from concord.studies.plan import plan_study
from concord.studies.proposals import GroupRuns
from concord.studies.search import config_at, derived
from concord.studies.study_options import options_for
from concord.tracking import Store
from concord.tracking.mirror import CURSOR
from concord.training import load_job
from concord.training.job import JobFile, with_rule
from concord.training.rule_file import RuleFile

pytestmark = pytest.mark.usefixtures("without_figures")
JOBS = Path(__file__).parents[1] / "jobs"
JOB, STUDY = str(JOBS / "shared_rule.py"), str(JOBS / "tiny_study.py")
SHORT: dict[str, Any] = {"epochs": 2, "batch_size": 16, "evaluations": 1, "checkpoints": 2}

# A rule with whatever fields a test needs.
RULE = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from concord.aggregation import GRADIENT, Update

@dataclass(frozen=True)
class Rule:
    FIELDS
    statistics: ClassVar = (GRADIENT,)

    def finish(self, sums, environments):
        return Update(sums["gradient"], torch.ones_like(sums["gradient"]))
"""


@pytest.fixture
def rule_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's rule, in the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_rule.py"
    path.write_text(snippet("own-rule"))
    return path


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What ``concord train`` says of this rule, in one line with exit status 2, before anything is written."""
    monkeypatch.chdir(tmp_path)

    def call(source: str, *options: str, reference: str = "my_rule.py:Rule", command: str = "train") -> str:
        (tmp_path / "my_rule.py").write_text(source)
        capsys.readouterr()
        assert main([command, JOB, "--aggregator", reference, *options, "--output", str(tmp_path / "runs")]) == 2
        assert not (tmp_path / "runs").exists()
        (line,) = capsys.readouterr().err.splitlines()
        return str(line.removeprefix("concord: "))

    return call


OF_OTHER_FAMILIES = """
from dataclasses import dataclass
import torch

@dataclass(frozen=True)
class Weights:
    factor: float = 1.0

    def weights(self, gram):
        return BODY

@dataclass(frozen=True)
class Columns:
    def combine(self, columns):
        return columns.amax(0)
"""


def with_fields(*fields: str) -> str:
    return RULE.replace("FIELDS", "\n    ".join(fields))


def job_with(file: Path, name: str = "TrimmedSign", job: str = JOB) -> JobFile:
    return with_rule(load_job(job), RuleFile.read(f"{file}:{name}"))


def with_own_rule(job: JobFile, words: Sequence[str], record: Any = None) -> tuple[JobFile, list[str]]:
    job = command_options.with_own_rule(job, early_values(words)["aggregator"], record)
    return job, with_canonical_rule(job, words)


def configured(job: JobFile, *words: str) -> Any:
    return parse(type(job.job.config), words, "concord train", job.job.config)


# --- options


def test_the_fields_of_a_rule_are_options_beside_the_job_s(rule_file: Path) -> None:
    words = [JOB, "--lr", "0.5", "--aggregator", "my_rule.py:TrimmedSign", "--dead-zone", "0.1", "--threshold", "0.7"]
    job, rest = with_own_rule(*job_and_words(words, "train"))
    config = configured(job, *rest)
    config.check()
    assert (config.optimizer.lr, config.aggregation.dead_zone, config.aggregation.threshold, config.pause) == (
        0.5,
        0.1,
        0.7,
        0.0,
    )
    assert dataclasses.asdict(config.resolve().rule()) == {"dead_zone": 0.1, "threshold": 0.7}
    assert config.aggregation.aggregator == "my_rule.py:TrimmedSign"
    assert config.resolve().method == "TrimmedSign"
    assert config.with_options(objective="irm").resolve().method == "irm-TrimmedSign"


@pytest.mark.parametrize("words", [["--aggregator=~/my_rule.py:TrimmedSign"], ["--config=~/options.yaml"]])
def test_a_tilde_is_the_home_folder_before_a_rule_and_a_job(
    words: list[str], rule_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves it where the option and its value are one word, and in a file."""
    monkeypatch.setenv("HOME", str(rule_file.parent))
    (rule_file.parent / "options.yaml").write_text("aggregator: ~/my_rule.py:TrimmedSign\n")
    (rule_file.parent / "my_job.py").write_text(Path(JOB).read_text())
    job = read_command("train", load_job("~/my_job.py"), words, "concord train").job
    assert job.rule is not None
    assert (job.path, job.rule.path) == (str(rule_file.parent / "my_job.py"), str(rule_file))
    assert RuleFile.parts("~/my_rule.py:TrimmedSign") == (str(rule_file), "TrimmedSign")  # as a submission takes it
    with pytest.raises(InputError, match=r"aggregator=~nobody/my_rule\.py:TrimmedSign: there is no such file"):
        RuleFile.read("~nobody/my_rule.py:TrimmedSign")


def test_help_has_the_fields_with_what_the_file_says_of_them(
    rule_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", JOB, "--aggregator", f"{rule_file}:TrimmedSign", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--dead-zone 0 Magnitude up to which a component casts no vote." in said


def test_a_seed_of_the_rule_is_the_run_s(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "my_rule.py").write_text(with_fields("seed: int = 7"))
    config = configured(job_with(tmp_path / "my_rule.py", "Rule"), "--seed", "3")
    assert config.resolve().rule().seed == 3


def test_options_that_the_rule_does_not_look_at_are_no_parameters(rule_file: Path, tmp_path: Path) -> None:
    assert not {"threshold", "rescale", "dead_zone"} & configured(job_with(rule_file)).resolve().unused()
    other = tmp_path / "other.py"
    other.write_text(with_fields("size: int = 1"))
    assert "threshold" in configured(job_with(other, "Rule")).resolve().unused()


def test_records_name_the_rule_and_its_fields_but_not_the_machine_s_folder(rule_file: Path) -> None:
    recorded = recorded_config(configured(job_with(rule_file), "--dead-zone", "0.1"))
    assert (recorded["aggregator"], recorded["dead_zone"]) == ("my_rule.py:TrimmedSign", 0.1)
    assert configured(job_with(rule_file)).sources() == {"my_rule.py": rule_file.read_text()}
    assert load_job(JOB).job.config.sources() == {}


@pytest.mark.parametrize("command", ["train", "tune", "compare"])
def test_printed_options_have_the_path_of_the_rule(
    rule_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    job = str(JOBS / "tiny_compared.py") if command == "compare" else JOB
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([command, job, "--aggregator", "../my_rule.py:TrimmedSign", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert f"aggregator: {rule_file}:TrimmedSign\n" in printed
    (tmp_path / "options.yaml").write_text(printed)
    assert main([command, job, "--config", "../options.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_without_a_rule_of_one_s_own_nothing_changes() -> None:
    job, words = with_own_rule(*job_and_words([JOB, "--aggregator", "mean"], "train"))
    assert job.rule is None
    assert configured(job, *words).resolve().rule() == Mean()
    assert load_job(JOB).job.config.with_options(threshold=0.5).resolve().rule() == AndMask(0.5)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("raise RuntimeError('no')", "cannot be loaded (RuntimeError: no, line 1)"),
        ("def Rule(", "cannot be loaded (SyntaxError: "),
        ("import nothing_of_this_name", "cannot be loaded (ModuleNotFoundError: "),
        ("x = 1", "there is no Rule in the file; it has no rule"),
        (
            with_fields("size: int = 1").replace("class Rule", "class Other"),
            "there is no Rule in the file; it has Other",
        ),
        ("class Rule:\n    pass", "is no dataclass; a rule is a frozen dataclass with statistics and finish"),
        ("Rule = 3", "is no dataclass"),
        (with_fields("statistics: int = 1").replace("statistics: ClassVar = (GRADIENT,)", ""), "rule Rule: needs "),
        (with_fields("lr: float = 1.0"), "its field lr is another option of the job; rename it"),
        (with_fields("pause: float = 1.0"), "its field pause is another option of the job; rename it"),
        (with_fields("check: float = 1.0"), "its field check is another option of the job; rename it"),
        (with_fields("threshold: str = 'a'"), "its field threshold must be of type float, as --threshold is"),
        (
            with_fields("size: torch.Tensor = None"),
            "its field size is of type <class 'torch.Tensor'>; make it a number",
        ),
        (with_fields("size: 'Nothing' = 1"), "its fields have no types (NameError: name 'Nothing' is not defined"),
        (with_fields().replace('sums["gradient"],', 'sums["sign"],'), "cannot be used (KeyError: 'sign', line 13)"),
        (with_fields().replace('sums["gradient"],', 'sums["gradient"].sum(),'), "rule Rule: finish gives () as"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said_in_one_line(refused: Callable[..., str], source: str, line: str) -> None:
    assert refused(source).startswith(f"--aggregator my_rule.py:Rule: {line}")


def test_what_is_wrong_with_the_options_is_said_in_one_line(refused: Callable[..., str]) -> None:
    source = with_fields("dead_zone: float", "threshold: float = 1.0")
    assert refused(source).startswith("--dead-zone: is required; ")
    assert refused(source, "--dead-zone", "wide") == "--dead-zone wide: must be a number"
    beyond = refused(source, "--dead-zone", "1", "--threshold", "2")
    assert beyond == "--threshold 2.0: the agreement threshold must lie in [0, 1]"
    assert refused(source, reference="no.py:Rule") == "--aggregator no.py:Rule: there is no such file"
    unnamed = "--aggregator my_rule.py: name the rule in the file: FILE.py:RULE"
    assert refused(source, reference="my_rule.py") == unnamed
    study = with_fields("trials: int = 1")
    assert refused(study, command="tune") == "job option --trials: is also an option of concord tune; rename it"


def test_a_rule_s_own_refusal_names_the_option(refused: Callable[..., str]) -> None:
    source = with_fields(
        "size: int = 1", "def __post_init__(self):", "    raise ArgumentError('size', self.size, 'odd')"
    )
    source = "from concord.errors import ArgumentError\n" + source
    assert refused(source, "--size", "3") == "--size 3: odd"


def test_a_job_with_a_loop_of_its_own_takes_no_rule(rule_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "coinrun-expert", "--aggregator", "my_rule.py:TrimmedSign"]) == 2
    assert "job coinrun-expert has a loop of its own" in capsys.readouterr().err


# --- the text that travels


def test_a_rule_works_where_its_file_is_not(rule_file: Path) -> None:
    job = job_with(rule_file)
    options = option_values(configured(job, "--dead-zone", "0.5", "--threshold", "1"))
    sent = pickle.loads(pickle.dumps(job.sent))
    rule_file.unlink()
    there = sent.load().job.config.with_options(**options)
    gradients = torch.tensor([[1.0, 1.0], [1.0, 0.1]])
    assert aggregate(there.resolve().rule(), gradients).value.tolist() == [1.0, 0.0]


def test_a_run_that_goes_on_has_the_text_it_began_with(rule_file: Path) -> None:
    record = {
        "config": recorded_config(configured(job_with(rule_file))),
        "sources": configured(job_with(rule_file)).sources(),
    }
    rule_file.write_text("raise RuntimeError")
    job, words = with_own_rule(load_job(JOB), ["--name", "a"], record)
    assert configured(job).aggregation.aggregator == "my_rule.py:TrimmedSign"
    assert words == ["--name", "a"]
    job, _ = with_own_rule(load_job(JOB), ["--aggregator=mean"], record)
    assert job.rule is None


def test_a_submission_takes_the_rule_s_file_along(
    rule_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_command("train", load_job(JOB), ["--lr", "1"], "concord train").job.rule is None
    words = ["--aggregator", f"{rule_file}:TrimmedSign", "--dead-zone", "1"]
    command = read_command("train", load_job(JOB), words, f"concord submit train {JOB}")
    assert check_command(command).startswith("shared-rule-TrimmedSign-")
    assert inside(Path(command.job.rule.path), tmp_path) == Path("my_rule.py")
    (tmp_path / "elsewhere").mkdir()
    words = ["submit", "train", "synthetic", "--working-dir", str(tmp_path / "elsewhere"), "--output", "/runs"]
    assert main([*words, "--aggregator", "my_rule.py:TrimmedSign"]) == 2
    assert f"{rule_file}: lies outside the working directory" in capsys.readouterr().err


# --- spaces


def planned(rule_file: Path, output: Path, **options: Any) -> Any:
    job = job_with(rule_file, job=STUDY)
    given = {"output": output, "name": "s", "trials": 2} | options
    return plan_study(job, options_for(job.job.config).with_options(**given), given={*given, "aggregator"})


def test_a_study_varies_the_fields_of_the_rule_that_it_is_given(rule_file: Path, tmp_path: Path) -> None:
    plan = planned(rule_file, tmp_path / "runs", vary=("dead_zone=0.1,0.2",))
    assert plan.space.entries["dead_zone"] == Choice(0.1, 0.2)
    assert "aggregator" not in plan.space.names()
    config = config_at(plan.base, plan.space, plan.first[0] if plan.first else {"dead_zone": 0.1})
    assert config.aggregation.aggregator == "my_rule.py:TrimmedSign"
    with pytest.raises(InputError, match="space: dead_zone wide: must be a number"):
        planned(rule_file, tmp_path / "runs", vary=("dead_zone=0.1,wide",))
    with pytest.raises(InputError, match="the job has no such option"):
        planned(rule_file, tmp_path / "runs", vary=("alive_zone=0.1,0.2",))


def test_the_space_of_every_job_has_the_threshold_of_a_rule_that_has_one(rule_file: Path, tmp_path: Path) -> None:
    assert derived(configured(job_with(rule_file))).entries["threshold"] == Uniform(0.0, 1.0)
    other = tmp_path / "other.py"
    other.write_text(with_fields("size: int = 1"))
    assert {"threshold", "rescale"} & set(derived(configured(job_with(other, "Rule"))).entries) == {"rescale"}


# --- real runs


def test_a_run_trains_by_the_rule_and_resumes_from_another_folder(
    rule_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, output = rule_file.read_text(), tmp_path / "runs"
    job = job_with(rule_file)
    rule_file.unlink()
    finished = run(job, job.job.config.with_options(**SHORT, dead_zone=1e9, output=output, name="a"), lambda _: None)
    assert finished.metrics["kept_fraction"] == 0.0  # nothing is above such a dead zone
    store = Store.open(output, None)
    (tracked,) = tracked_runs(store, "shared-rule")
    assert tracked.parameters["aggregator"] == "my_rule.py:TrimmedSign"
    assert float(tracked.parameters["dead_zone"]) == 1e9
    kept = store.client.download_artifacts(str(finished.run_id), "my_rule.py", str(tmp_path))
    assert Path(kept).read_text() == text
    # As if it had not come to its end, in the store as well.
    events = finished.folder.path / EVENTS
    before = "".join(line for line in events.read_text().splitlines(True) if '"event":"ended"' not in line)
    events.write_text(before)
    append_line(finished.folder.path / CURSOR, len(before.encode()))
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    again = ["train", JOB, "--output", str(output), "--name", "a", "--resume"]
    assert main(again) == 0
    report = require_run(finished.folder).report
    assert report is not None
    assert report["run_id"] == finished.run_id
    # Another text is another rule.
    (tmp_path / "there" / "my_rule.py").write_text(text + "\n# changed\n")
    changed = job_with(tmp_path / "there" / "my_rule.py")
    config = changed.job.config.with_options(**SHORT, dead_zone=1e9, output=output, name="a", resume=True)
    with pytest.raises(InputError, match=r"my_rule\.py: the run a was started with another text of this file"):
        run(changed, config, lambda _: None)


def test_a_study_searches_a_field_of_the_rule_and_goes_on_without_its_file(
    ray_cluster: None,
    rule_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "space.toml").write_text("dead_zone = [0.0, 1e9]\n")

    def tuned(*words: str) -> Mapping[str, Any]:
        assert main(["tune", STUDY, "--name", "s", "--output", "runs", "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        return found

    options = ["--search", "grid", "--space", "space.toml", "--concurrent", "1", "--reruns", "0", "--shortlist", "0"]
    first = tuned("--aggregator", "my_rule.py:TrimmedSign", *options, "--no-register")
    first_run, second_run = GroupRuns(require_run(folder_of(tmp_path / "runs", "s", "study"), "study")).finished(
        "trial"
    )
    assert [each.point["dead_zone"] for each in (first_run, second_run)] == [0.0, 1e9]
    assert second_run.metrics["kept_fraction"] == 0.0 < first_run.metrics["kept_fraction"]
    rule_file.unlink()
    assert tuned()["best"] == first["best"]


# --- rules of the other families


@pytest.mark.parametrize("name", ["Weights", "Columns"])
def test_a_weighting_or_column_rule_of_a_file_trains(tmp_path: Path, name: str) -> None:
    file = tmp_path / "my_rule.py"
    file.write_text(OF_OTHER_FAMILIES.replace("BODY", "torch.full((len(gram),), self.factor / len(gram))"))
    job = job_with(file, name)
    config = job.job.config.with_options(**SHORT, output=tmp_path / "runs", register=False)
    config.check()
    finished = run(job, config, lambda _: None)
    metrics = json.loads((finished.folder.path / "metrics.json").read_text())
    assert not any("kept_fraction" in each for each in metrics)
    assert any(each.startswith("weight/") for each in metrics) == (name == "Weights")


def test_a_weighting_of_a_file_that_gives_wrong_weights_is_refused(refused: Callable[..., str]) -> None:
    wrong = OF_OTHER_FAMILIES.replace("BODY", "gram[0, :1]")
    said = refused(wrong, reference="my_rule.py:Weights")
    assert said == (
        "--aggregator my_rule.py:Weights: rule Weights: gives weights of shape (1,) for 3 environments; expected (3,)"
    )
    assert "it has Weights, Columns" in refused(wrong, reference="my_rule.py:Other")
