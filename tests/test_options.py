"""Options in groups: plain names for users, defaults from an instance, and option files."""

import contextlib
import io
import itertools
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from recorded import described

from concord.cli import main
from concord.cli.job_options import read_command
from concord.cli.parsing import parse
from concord.errors import InputError
from concord.execution.key import recorded_config
from concord.execution.restored_options import restored_config
from concord.interface.option_file import FileOptions
from concord.job_files import built_in_jobs
from concord.options import (
    NEEDED,
    OptionGroup,
    Role,
    as_text,
    defaults_of,
    did_you_mean,
    from_plain,
    names_of,
    option_values,
    options_of,
)
from concord.record import write_record
from concord.storage import Folder
from concord.training import TrainConfig, load_job
from concord.training.job import Job
from concord.training.options import OptimizerOptions, ScheduleOptions

OPTIONS = options_of(TrainConfig)


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """The options of a user's job."""

    width: int = 8
    """Units."""


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Valid values of an option of this type."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(values_of(get_args(hint)[0]), max_size=3).map(tuple)
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-5, 5),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.from_regex("[a-z]{1,5}", fullmatch=True),
        Path: st.from_regex("[a-z]{1,5}", fullmatch=True).map(Path),
        type(None): st.none(),
    }
    if hint in kinds:
        return kinds[hint]
    return st.one_of(*map(values_of, get_args(hint)))


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Some options with valid values."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=8))
    return {name: draw(values_of(OPTIONS[name].hint)) for name in names}


@given(changes())
def test_options_by_their_plain_names_come_back_as_they_were_given(given_: dict[str, Any]) -> None:
    config = TrainConfig().with_options(**given_)
    implied = {"keep": "best"} if given_.get("patience") else {}
    if isinstance(left_out := given_.get("leave_out"), tuple):  # a set of names; one is itself
        names = tuple(sorted(set(left_out)))
        given_ = given_ | {"leave_out": names if len(names) > 1 else next(iter(names), None)}
    assert option_values(config) == option_values(TrainConfig()) | implied | given_
    assert TrainConfig().with_options(**option_values(config)) == config


@given(changes())
def test_a_record_gives_back_what_was_recorded(given_: dict[str, Any]) -> None:
    config = TrainConfig().with_options(**given_)
    recorded = json.loads(json.dumps(recorded_config(config)))
    ours, theirs = option_values(config), option_values(restored_config(TrainConfig(), recorded))
    kept = names_of(TrainConfig, *set(Role) - {Role.UNKEPT})  # without those of one command or machine
    assert recorded.keys() == kept
    assert {name: theirs[name] for name in kept} == {name: ours[name] for name in kept}


@given(changes())
def test_options_are_resolved_once_and_keep_what_was_given(given_: dict[str, Any]) -> None:
    config = TrainConfig().with_options(**given_)
    resolved = config.resolve()
    assert resolved.resolve() == resolved
    assert config == TrainConfig().with_options(**given_)
    left_open = {name for name, value in option_values(config).items() if value in (None, "auto")}
    in_use = option_values(resolved)
    assert {name for name, value in option_values(config).items() if value != in_use[name]} <= left_open


def test_a_record_of_an_earlier_version_is_flat_and_restores() -> None:
    recorded = {"seed": 3, "lr": 0.5, "milestones": [0.25], "inner_lr": 0.2, "data": "there", "gone": 1}
    config = restored_config(Config(), recorded)
    assert (config.run.seed, config.optimizer.lr, config.schedule.milestones) == (3, 0.5, (0.25,))
    assert (config.objective.inner_lr, config.data.data, config.width) == (0.2, Path("there"), 8)


def test_a_result_depends_on_every_option_but_those_of_its_place_and_its_command() -> None:
    place = {"checkpoints", "data", "max_failures", "min_workers", "model_name", "output", "readers", "register"}
    assert names_of(TrainConfig, Role.PLACE) == place | {"device", "graph", "wait_for_resources", "workers"}
    unkept = {"address", "experiment", "name", "resume", "tag", "tracking_patience", "tracking_uri"}
    assert names_of(TrainConfig, Role.UNKEPT) == unkept


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="treshold: there is no such option; did you mean threshold"):
        TrainConfig().with_options(treshold=0.5)


def test_a_group_refuses_its_own_mistakes() -> None:
    with pytest.raises(InputError, match="--lr -1: must be a finite number above 0"):
        OptimizerOptions(lr=-1).check()
    with pytest.raises(InputError, match="--lr -1"):
        TrainConfig(optimizer=OptimizerOptions(lr=-1)).check()


def test_a_job_changes_defaults_by_groups_by_names_and_not_at_all() -> None:
    by_groups = Config(optimizer=OptimizerOptions(lr=0.5), schedule=ScheduleOptions(epochs=3))
    parts: dict[str, Any] = {"environments": print, "model": print, "loss": print}
    assert Job(**parts, config=by_groups).config == Config().with_options(lr=0.5, epochs=3)
    assert Job(**parts, config=Config).config == Config()
    assert Job(**parts).config == TrainConfig()
    assert parse(Config, ["--lr", "2"], "mine", by_groups) == by_groups.with_options(lr=2.0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("lr: float = 0.5", r"Mine.lr: is an option already; to change its default write Job\(…, config=Mine\(\)"
         r".with_options\(lr=0.5\)\)"),
        ("lr = 0.5", "Mine.lr: is an option already"),
        ("data: str = 'mnist'", "Mine.data: is the name of a group of options; rename it"),
    ],
)  # fmt: skip
def test_an_option_that_is_declared_again_is_refused_with_what_to_write(body: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        exec(f"class Mine(TrainConfig):\n    {body}", {"TrainConfig": TrainConfig})


def test_an_option_that_a_group_of_the_job_s_own_has_again_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(OptionGroup):
        lr: float = 0.5

    @dataclass(frozen=True, kw_only=True)
    class Mine(TrainConfig):
        own: Own = field(default_factory=Own)

    with pytest.raises(InputError, match="Mine: --lr is declared twice"):
        Job(print, print, print, config=Mine())  # type: ignore[type-var, arg-type]


def test_what_an_option_leaves_to_others_follows_when_they_are_varied() -> None:
    asked = TrainConfig().with_options(objective="irm")
    assert asked.aggregation.aggregator == "auto"
    assert asked.resolve().aggregation.aggregator == "mean"
    back = asked.resolve().with_options(objective="erm", aggregator="auto").resolve()
    assert back.aggregation.aggregator == "mean"


@pytest.mark.parametrize("name", sorted(built_in_jobs().keys() - {"image-domains", "table"}))
def test_every_job_s_defaults_can_be_meant(name: str) -> None:
    load_job(name).job.config.check()


# --- files


def printed(*words: str) -> str:
    """The output of the command line."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(list(words)) == 0
    return out.getvalue()


def test_what_is_printed_can_be_given_back(tmp_path: Path) -> None:
    words = ["--lr", "3e-05", "--objective", "irm", "--milestones", "0.5", "--shortcut-dimensions", "4", "--no-rescale"]
    said = printed("train", "synthetic", *words, "--print-config")
    values = yaml.safe_load(said)
    assert (values["lr"], values["objective"], values["milestones"]) == (3e-5, "irm", [0.5])
    file = tmp_path / "mine.yaml"
    file.write_text(said)
    assert printed("train", "synthetic", "--config", str(file), "--print-config") == said


def test_what_is_printed_holds_for_another_objective_too(tmp_path: Path) -> None:
    """A derived value is not printed: it would no longer follow from the objective."""
    file = tmp_path / "mine.yaml"
    file.write_text(printed("train", "synthetic", "--print-config"))
    words = ["--config", str(file), "--objective", "vrex"]
    found = read_command("train", load_job("synthetic"), words, "concord train synthetic")
    assert found.given == {"objective"}
    assert option_values(found.options.resolve())["aggregator"] == "mean"


def test_the_command_line_wins_over_the_file_in_any_form(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("lr = 0.5\nbatch-size = 7\nmilestones = [0.25, 0.5]\n")
    (tmp_path / "a.json").write_text('{"lr": 0.5, "batch_size": 7, "milestones": [0.25, 0.5]}')
    (tmp_path / "a.yaml").write_text("lr: 5e-1\nbatch_size: 7\nmilestones: [0.25, 0.5]\n")
    said = {
        printed("train", "synthetic", "--config", str(tmp_path / f"a.{kind}"), "--lr", "2", "--print-config")
        for kind in ("toml", "json", "yaml")
    }
    assert len(said) == 1
    values = yaml.safe_load(said.pop())
    assert (values["lr"], values["batch_size"], values["milestones"]) == (2.0, 7, [0.25, 0.5])


def test_a_run_s_record_is_a_file_of_options(tmp_path: Path) -> None:
    config = load_job("synthetic").job.config.with_options(lr=0.5, name="old", output=tmp_path / "out")
    recorded = recorded_config(config.resolve())
    for name, text in (
        ("record.json", {"job": "synthetic", "run_id": "1", "config": recorded}),
        ("config.json", recorded),
    ):
        (tmp_path / name).write_text(json.dumps(text))
        values = yaml.safe_load(printed("train", "synthetic", "--config", str(tmp_path / name), "--print-config"))
        assert values["lr"] == 0.5
        assert "name" not in values  # each run has its own name


def test_a_list_of_names_may_be_one_name(tmp_path: Path) -> None:
    known = options_of(type(load_job("table").job.config))
    given = {"test": "far west", "target": "died", "name": "a", "milestones": "0.5", "data": "a.csv"}
    assert from_plain(known, given) == {**given, "test": ("far west",), "data": Path("a.csv")}
    for names, read in (
        (2019, ("2019",)),
        ([2019, np.int64(2020), "x"], ("2019", "2020", "x")),
        ((), ()),
        (True, True),
        ([1.5], (1.5,)),
    ):
        assert from_plain(known, {"test": names})["test"] == read
    assert [from_plain(known, {"leave_out": each})["leave_out"] for each in ("a", 2019, ["a"], None)] == [
        "a", "2019", ("a",), None,
    ]  # fmt: skip
    (tmp_path / "mine.yaml").write_text("target: died\ntest: west\n")
    values = yaml.safe_load(printed("train", "table", "--config", str(tmp_path / "mine.yaml"), "--print-config"))
    assert values["test"] == ["west"]


@pytest.mark.parametrize(("command", "own"), [("tune", {"trials": 3}), ("compare", {"seeds": 3})])
def test_a_study_and_a_comparison_begin_from_a_file_too(tmp_path: Path, command: str, own: dict[str, int]) -> None:
    words = [f"--{name}={value}" for name, value in own.items()]
    words += ["--lr", "0.5", "--no-rescale", "--milestones", "0.5"]
    said = printed(command, "synthetic", *words, "--print-config")
    (tmp_path / "mine.yaml").write_text(said)
    assert printed(command, "synthetic", "--config", str(tmp_path / "mine.yaml"), "--print-config") == said
    assert {**own, "lr": 0.5, "rescale": False, "milestones": [0.5]}.items() <= yaml.safe_load(said).items()


@pytest.mark.parametrize("command", ["train", "tune", "compare"])
def test_the_words_count_over_a_file_whose_option_they_replace(tmp_path: Path, command: str) -> None:
    (tmp_path / "mine.yaml").write_text("significance: 1e-3\nlr: 0.5\n")
    words = ["--config", str(tmp_path / "mine.yaml"), "--threshold", "0.9"]
    found = read_command(command, load_job("synthetic"), words, f"concord {command} synthetic")
    values = option_values(found.options)
    assert (values["significance"], values["threshold"], values["lr"]) == (None, 0.9, 0.5)
    assert found.given == {"significance", "threshold", "lr"}


def test_an_option_that_cannot_be_varied_is_named_with_its_source(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "mine.yaml").write_text("lr: 0.5\n")
    record = described("study", job="synthetic", config={"lr": 0.5}, given=["lr"])
    folder = Folder(tmp_path / "studies" / "s")
    folder.make()
    write_record(folder, "study", record)
    words = ["tune", "synthetic", "--vary", "lr=0.1,0.2", "--output", tmp_path]
    file, name = ["--config", tmp_path / "mine.yaml"], ["--name", "s"]
    for more, source in (
        (file, f" in {tmp_path / 'mine.yaml'}"),
        (name, " of the study s"),
        ([*file, "--lr", "0.5"], ""),
    ):
        assert refused(*words, *more) == f"--vary lr: contradicts --lr{source}, which fixes it"


def test_what_would_be_submitted_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("lr: 0.5\n")
    words = ["compare", "synthetic", "--config", str(tmp_path / "mine.yaml"), "--seeds", "3", "--print-config"]
    assert printed("submit", *words, "--address", "127.0.0.1:1") == printed(*words)


# Six lines for a million values.
ALIASES = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in itertools.pairwise("abcdef")
)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "treshold: 0.5", "a.yaml: treshold: there is no such option; did you mean threshold?"),
        ("a.yaml", "lr: fast", "a.yaml: lr fast: must be a number"),
        ("a.toml", "optimizer = 'adma'", "a.toml: optimizer adma: must be one of adam, adamw, sgd, temporal-and-mask"),
        ("a.yaml", "- lr", "a.yaml: holds list; expected a mapping of options by name"),
        ("a.json", "{", "a.json: cannot be read"),
        ("a.yaml", "lr: 1\nepochs: 2\nlr: 0.5", "a.yaml: cannot be read (lr is given twice)"),
        ("a.json", '{"lr": 1, "lr": 0.5}', "a.json: cannot be read (lr is given twice)"),
        ("a.yaml", "batch-size: 1\nbatch_size: 2", "a.yaml: batch_size is given twice"),
        ("a.txt", "lr: 1", "a.txt: has an unknown ending; give a .yaml, .toml or .json"),
        ("a.yaml", None, "a.yaml: there is no such file"),
        # YAML 1.2: 90, 8 and False in YAML 1.1
        ("a.yaml", "epochs: 1:30", "a.yaml: epochs 1:30: must be a whole number"),
        ("a.yaml", "rescale: NO", "a.yaml: rescale NO: must be true or false"),
        ("a.yaml", "milestones: [0.5, off]", 'a.yaml: milestones [0.5, "off"]: must be a list, each a number'),
        ("a.yaml", "milestones: 0.5", "a.yaml: milestones 0.5: must be a list, each a number"),
        ("a.yaml", "lr: !!python/name:os.system", "a.yaml: cannot be read (could not determine a constructor"),
        (
            "a.yaml",
            "epochs: 3\nlr: [1,\n",
            "a.yaml: cannot be read (expected the node content, but found",
        ),
        ("a.yaml", "lr: &a [*a]", "a.yaml: cannot be read (holds more than 100,000 values"),
        ("a.yaml", ALIASES, "a.yaml: cannot be read (holds more than 100,000 values"),
        ("a.yaml", "lr: " + "[" * 3000, "a.yaml: cannot be read (nests too deeply)"),
        ("a.json", '{"lr": ' + "[" * 99_999, "a.json: cannot be read (nests too deeply)"),
        ("a.toml", "lr = " + "[" * 9999, "a.toml: cannot be read (nests too deeply)"),
        ("a.json", f'{{"{"n" * 100_000}": 1}}', f"a.json: {'n' * 80}… (100,000 characters): there is no such option"),
        ("a.json", f'{{"lr": "{"x" * 99_999}"}}', f"a.json: lr {'x' * 80}… (99,999 characters): must be a number"),
        ("a.json", f'{{"epochs": {"9" * 30}}}', f"a.json: epochs {'9' * 30}: must be a whole number"),
        (
            "a.toml",
            f"# {'x' * (1 << 20)}",
            "a.toml: cannot be read (has 1,048,578 bytes; a file of",
        ),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    for command in ("train", "compare") if len(text or "") < 100 else ("train",):
        assert main([command, "synthetic", "--config", str(tmp_path / name), "--print-config"]) == 2
        assert said in capsys.readouterr().err


def test_a_pipe_and_a_folder_are_no_files_of_options(tmp_path: Path, refused: Callable[..., str]) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("pipe.yaml", "folder.yaml"):
        said = refused("train", "synthetic", "--config", tmp_path / name)
        assert said == f"--config {tmp_path / name}: is not a file"


def test_yaml_is_read_by_the_rules_of_version_1_2(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 010\nlr: 1e-3\nname: NO\nepochs: 0o17\n")
    assert FileOptions.read(tmp_path / "a.yaml").values == {"seed": 10, "lr": 1e-3, "name": "NO", "epochs": 15}


@pytest.mark.parametrize("option", ["epochs", "batch_size", "seed", "evaluations"])
def test_whole_numbers_beyond_64_bits_are_refused_before_a_run_begins(refused: Callable[..., str], option: str) -> None:
    flag = f"--{option.replace('_', '-')}"
    assert refused("train", "synthetic", flag, 2**63) == f"{flag} {2**63}: must not be above {2**63 - 1}"


@pytest.mark.parametrize("words", [[], ["--lr", "1"]])
def test_a_file_that_is_not_named_is_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "synthetic", "--config", *words]) == 2
    assert "--config: needs a value; give a YAML, TOML or JSON file" in capsys.readouterr().err


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse(TrainConfig, ["--output=~/runs", "--data=~/a b"], "test")
    assert (config.run.output, config.data.data) == (tmp_path / "runs", tmp_path / "a b")
    file = tmp_path / "options.yaml"
    file.write_text("output: ~/runs\n")
    assert FileOptions.read(file).over(TrainConfig()).run.output == tmp_path / "runs"
    assert parse(TrainConfig, ["--output", "~no-such-user/runs"], "test").run.output == Path("~no-such-user/runs")


@pytest.mark.parametrize("words", [["--output", ""], ["--output="], ["--data", ""], ["--output", " "]])
def test_an_empty_path_is_refused(words: list[str], tmp_path: Path) -> None:
    option = words[0].removesuffix("=")
    with pytest.raises(InputError, match=f"^{option} .*: must be a path$"):
        parse(TrainConfig, words, "test")
    file = tmp_path / "options.yaml"
    file.write_text(f"{option.removeprefix('--')}: ''\n")
    with pytest.raises(InputError, match="must be a path"):
        FileOptions.read(file).over(TrainConfig())


@pytest.mark.parametrize(
    ("value", "text"), [(("west", "north"), "west north"), ([8, 8], "8 8"), ((), ""), (0.1, "0.1")]
)
def test_a_value_is_written_as_on_the_command_line(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize("name", ["--csv", "--no-foo", "--taget", "--a", "--file", "--label", "--abc"])
def test_a_name_far_from_all_others_has_no_suggestion(name: str) -> None:
    known = ["--epochs", "--stop-from", "--aggregator", "--name", "--quantile", "--xyc", "--lr"]
    assert did_you_mean(name, known) == ""


@pytest.mark.parametrize(("name", "near"), [("--lrr", "--lr"), ("-lr", "--lr"), ("--epoch", "--epochs"), ("lrr", "lr")])
def test_a_near_name_is_suggested_as_it_is_written(name: str, near: str) -> None:
    assert did_you_mean(name, [near, "--name"]) == f"; did you mean {near}?"


def test_a_class_that_was_sent_by_value_has_its_options() -> None:
    """As a worker gets one of a notebook: its fields hold a copy of ``dataclasses.MISSING``."""

    @dataclass(frozen=True, kw_only=True)
    class Sent(OptionGroup):
        width: int
        depth: int = 2
        names: tuple[str, ...] = field(default_factory=tuple)

    for each in fields(Sent):
        for part in ("default", "default_factory"):
            setattr(each, part, pickle.loads(pickle.dumps(getattr(each, part))))
    assert {name: option.default for name, option in options_of(Sent).items()} == {
        "width": NEEDED,
        "depth": 2,
        "names": (),
    }
    assert defaults_of(Sent) == Sent(width=NEEDED)  # type: ignore[arg-type]
