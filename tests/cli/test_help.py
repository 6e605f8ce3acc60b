"""Help: quick if no job must be run, and on one screen for a job."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Concord

from concord.cli import COMMANDS
from concord.cli.help import FIRST_OPTIONS, OptionHelp, option_help
from concord.interface.command_options import default_options
from concord.job_files import JobText, built_in_jobs, job_texts
from concord.options import options_of
from concord.training import load_job

SHARED_RULE = Path(__file__).parents[1] / "jobs" / "shared_rule.py"
ONE_SCREEN = 46  # lines


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def options_in(text: str) -> list[str]:
    """The options that help explains, in its order."""
    return re.findall(r"^  --(?:\[no-\])?([\w-]+)", text, re.MULTILINE)


def test_help_without_a_job_imports_nothing_slow_and_knows_the_jobs() -> None:
    program = """
import sys
from concord.cli import main
def helped(*words):
    try:
        return main(words)
    except SystemExit as stop:
        return stop.code
assert {helped(word) for word in ("--help", "-h", "--version")} == {0}
assert "tyro" not in sys.modules and "rich" not in sys.modules, "these also take a third of a second"
for command in ("train", "tune", "report", "data"):
    assert helped(command, "--help") == 0
    assert helped(command) == 2
assert helped("jobs") == helped("runs", "--help") == helped("models", "--help") == helped("demo", "--help") == 0
assert helped("nonsense") == helped() == 2
slow = {"torch", "ray", "mlflow", "pyarrow", "matplotlib", "sklearn", "concord_jobs"} & set(sys.modules)
assert not slow, slow
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  synthetic ") == 4, "of train, tune and report, and of jobs"


def test_help_names_every_command(concord_: Concord) -> None:
    for word in ("--help", "-h"):
        said = concord_(word)
        assert (said.status, said.err) == (0, "")
        assert all(f"concord {command}" in said.out for command in COMMANDS)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"train", "tune", "report"}))
def test_every_command_explains_itself(concord_: Concord, command: str) -> None:
    said = concord_(command, "--help")
    assert said.status == 0
    assert said.out.startswith(f"usage: concord {command}")
    assert " JOB" in said.out.splitlines()[0] or len(said.out.splitlines()) <= ONE_SCREEN


def test_help_of_a_command_has_its_arguments_and_a_line_for_each_option(concord_: Concord) -> None:
    said = concord_("models", "--help").out
    assert said.startswith("usage: concord models [DO] [NAME] [VERSION] [--option value] …")
    assert options_in(said) == ["or-better", "yes", "output", "tracking-uri"]
    assert "list, show, promote" in said
    assert said.rstrip().endswith("concord models --help-all explains all 7 options in full.")
    assert concord_("logs", "--help").out.startswith("usage: concord logs ID [--option value] …")
    assert concord_("help").out == concord_("--help").out


def test_a_wrong_option_and_help_of_a_table_import_nothing_slow() -> None:
    program = """
import sys
from concord.cli import main
for job in ("table", "flights", "heart-disease", "digits"):
    assert main(["train", job, "--lrr", "3"]) == 2
assert main(["submit", "train", "table", "--lrr", "3"]) == 2
for command in ("train", "tune", "compare", "data"):
    for word in ("--help", "--help-all"):
        try:
            main([command, "table", word])
        except SystemExit:
            pass
slow = {"torch", "ray", "mlflow", "numpy", "pandas", "pyarrow", "matplotlib", "sklearn", "scipy"} & set(sys.modules)
assert not slow, slow
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_check_of_a_table_imports_neither_torch_nor_ray_nor_mlflow(tmp_path: Path) -> None:
    rows = [f"{place},{age},{age % 2}" for place in ("north", "south", "west") for age in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["place,age,died", *rows]))
    program = """
import sys
from concord.cli import main
assert main(["data", "table", "--check", sys.argv[1], "--environment", "place", "--target", "died"]) == 0
slow = {"torch", "ray", "mlflow", "matplotlib"} & set(sys.modules)
assert not slow, slow
"""
    command = [sys.executable, "-c", program, str(tmp_path / "rows.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "environment west (train): 20 rows" in done.stdout + done.stderr


def test_a_command_without_its_job_lists_the_jobs_and_is_refused(concord_: Concord) -> None:
    said = concord_("train")
    assert (said.status, said.out) == (2, "")
    *listed, line = said.err.splitlines()
    assert re.match("concord: train: no job is named; give one of .*synthetic.*, or a Python file", line)
    titles = " ".join(" ".join(listed).split())
    for text in job_texts():
        assert f"{text.name} {text.title}" in titles
    assert "\n".join(listed) + "\n" == concord_("train", "--help").out
    assert "coinrun-clone" in concord_("data").err
    assert "coinrun-expert " not in concord_("data", "--help").out, "it has no data to make"


def test_what_a_job_s_file_says_of_it_is_what_the_running_job_says() -> None:
    for text in job_texts():
        assert text.title.endswith("."), text.name
        assert text.reproduces == load_job(text.name).job.reproduces
    assert JobText("mine", "from concord.training import Job\njob = Job(reproduces=some_text)\n").reproduces == ""
    assert JobText("mine", "pass\n").title == ""


@pytest.mark.parametrize("job", [*built_in_jobs(), str(SHARED_RULE)])
def test_help_of_a_job_is_one_screen_that_begins_with_its_own_options(concord_: Concord, job: str) -> None:
    said = concord_("train", job, "--help")
    assert said.status == 0
    lines = said.out.splitlines()
    assert len(lines) <= ONE_SCREEN
    # The width does not depend on where the checkout lies.
    assert max(len(line.replace(str(SHARED_RULE), "tests/jobs/shared_rule.py")) for line in lines) <= 100
    names = options_of(type(load_job(job).job.config))
    shown = [option.replace("-", "_") for option in options_in(said.out)]
    assert len(set(shown)) == len(shown)
    assert set(shown) <= set(names)
    assert set(FIRST_OPTIONS) & set(names) <= set(shown)
    own = shown[: len(shown) - len([name for name in shown if name in FIRST_OPTIONS])]
    assert f"{job} --help-all explains all {len(names) + 2} options in full." in lines[-1]
    if job == "synthetic":
        assert own[0] == "environments"
        assert set(own) == set(shown) - set(FIRST_OPTIONS)
        assert "--environments 32 " in said.out


@pytest.mark.parametrize(("command", "first", "last"), [("tune", "trials", "top"), ("compare", "seeds", "concurrent")])
def test_help_of_a_study_or_a_comparison_begins_with_its_own_options(
    concord_: Concord, command: str, first: str, last: str
) -> None:
    shown = options_in(concord_(command, "synthetic", "--help").out)
    assert shown[0] == first
    assert shown.index(last) < shown.index("revolutions")
    own, of_the_job, _ = re.split("job[.a-z]* options", concord_(command, "synthetic", "--help-all").out, maxsplit=2)
    assert own.index(f"--{first} ") < own.index(f"--{last} ")
    assert "--batch-norm" in of_the_job


def test_an_option_that_a_job_declares_in_its_own_way_is_among_its_own(concord_: Concord) -> None:
    said = concord_("train", "table", "--help").out
    assert options_in(said)[:3] == ["data", "environment", "target"]
    assert options_in(said).count("data") == 1
    assert "CSV or Parquet file, or a folder with one file" in said


def test_help_of_a_comparison_without_tables_names_what_there_is(concord_: Concord) -> None:
    said = concord_("compare", "table", "--help")
    assert said.status == 0
    assert "Tables of this job: none; methods tunes each method instead" in " ".join(said.out.split())


@pytest.mark.parametrize("command", ["train", "tune"])
def test_all_help_has_every_option_with_its_explanation(concord_: Concord, command: str) -> None:
    said = concord_(command, "synthetic", "--help-all")
    assert said.status == 0
    words = "".join(re.sub("[│╭╮╰╯─]", " ", said.out).split())  # without spaces: a long word may be broken
    defaults = default_options(command, load_job("synthetic"), "synthetic")
    for name, option in option_help(type(defaults), default=defaults).items():
        assert option.flags[0] in words
        assert option.text, f"{name} has none"
        assert "".join(option.text.split()) in words


def test_a_line_of_help_is_cut_where_it_is_too_long() -> None:
    option = OptionHelp(("--some-option",), "NAME", ("one", "another"), "Words that go on for-ever and ever.", "one")
    assert list(option.lines(50)) == [
        "  --some-option one         Words that go on …",
        "                            one, another",
    ]
    assert list(OptionHelp(("--on", "--no-on"), "", (), "Text.", "True").lines(50)) == [
        "  --[no-]on                 Text."
    ]


def test_a_group_of_options_is_described_by_its_docstring(concord_: Concord) -> None:
    said = concord_("train", "table", "--help-all")
    assert "The table's columns." in said.out
    assert "fmt: off" not in said.out
