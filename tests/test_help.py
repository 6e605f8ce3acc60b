"""Help: quick where no job has to be run, on one screen for a job, and the same options for the shell's completion."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Concord

from concord.cli import COMMANDS
from concord.cli.completion import script
from concord.cli.help import FIRST_OPTIONS, OptionHelp, option_help
from concord.cli.job_options import default_options
from concord.job_files import JobText, built_in_jobs, job_texts
from concord.options import options_of
from concord.training import load_job

SHARED_RULE = Path(__file__).parent / "jobs" / "shared_rule.py"
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
assert "tyro" not in sys.modules and "rich" not in sys.modules, "these are a third of a second, too"
for command in ("train", "tune", "report", "data"):
    assert helped(command, "--help") == 0
    assert helped(command) == 2
assert helped("jobs") == helped("runs", "--help") == helped("models", "--help") == helped("demo", "--help") == 0
assert helped("nonsense") == helped() == 2
slow = {"torch", "ray", "mlflow", "pyarrow", "matplotlib", "sklearn"} & set(sys.modules)
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


def test_a_command_without_its_job_lists_the_jobs_and_is_refused(concord_: Concord) -> None:
    said = concord_("train")
    assert (said.status, said.out) == (2, "")
    *listed, line = said.err.splitlines()
    assert re.match("concord: train: which job[?] one of .*synthetic.*, or a Python file", line)
    titles = " ".join(" ".join(listed).split())
    for text in job_texts():
        assert f"{text.name} {text.title}" in titles
    assert "\n".join(listed) + "\n" == concord_("train", "--help").out
    assert "coinrun-clone" in concord_("data").err
    assert "coinrun-expert " not in concord_("data", "--help").out, "it has no data to make"


def test_what_a_job_s_file_says_of_it_is_what_the_running_job_says() -> None:
    for text in job_texts():
        assert text.title.endswith("."), text.name
        assert text.reproduces in (None, load_job(text.name).job.reproduces)
    assert JobText("mine", "from concord.training import Job\njob = Job(reproduces=some_text)\n").reproduces is None
    assert JobText("mine", "pass\n").title == ""


@pytest.mark.parametrize("job", [*built_in_jobs(), str(SHARED_RULE)])
def test_help_of_a_job_is_one_screen_that_begins_with_its_own_options(concord_: Concord, job: str) -> None:
    said = concord_("train", job, "--help")
    assert said.status == 0
    lines = said.out.splitlines()
    assert len(lines) <= ONE_SCREEN
    assert max(map(len, lines)) <= 100
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


@pytest.mark.parametrize("command", ["train", "tune"])
def test_all_help_has_every_option_with_its_explanation(concord_: Concord, command: str) -> None:
    said = concord_(command, "synthetic", "--help-all")
    assert said.status == 0
    words = "".join(re.sub("[│╭╮╰╯─]", " ", said.out).split())  # without spaces: a long word may be broken
    defaults = default_options(command, load_job("synthetic"), "synthetic")
    for option in option_help(type(defaults), defaults):
        assert option.flags[0] in words
        assert option.text, f"{option.name} has none"
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


# --- completion


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        (folder / shell).write_text(script(shell))
    return {shell: folder / shell for shell in ("bash", "zsh")}


def test_the_scripts_are_right_for_their_shells(scripts: dict[str, Path]) -> None:
    for shell, path in scripts.items():
        if shutil.which(shell) is not None:
            subprocess.run([shell, "-n", str(path)], check=True)


@pytest.fixture
def completed(scripts: dict[str, Path], tmp_path: Path) -> Callable[[str], list[str]]:
    """What bash offers for the last of these words, in a folder with the file data.csv."""
    (tmp_path / "data.csv").touch()

    def call(words: str) -> list[str]:
        program = 'source "$1"; COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2)); _concord; echo "${COMPREPLY[@]}"'
        command = ["bash", "-c", program, "bash", str(scripts["bash"]), *words.split(" ")]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()

    return call


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("concord tr", "train"),
        ("concord --c", "--completion"),
        ("concord --completion ", "bash zsh"),
        ("concord train syn", "synthetic"),
        ("concord train dat", "data.csv"),
        ("concord train synthetic --revo", "--revolutions"),
        ("concord train synthetic --revolutions ", ""),
        ("concord train synthetic --lr 0.1 --obj", "--objective"),
        ("concord train synthetic --objective m", "mm-rex meta-irm"),
        ("concord train synthetic --output dat", "data.csv"),
        ("concord train synthetic --tri", ""),
        ("concord tune synthetic --tri", "--trials"),
        ("concord train folder/mine.py --thr", "--threshold"),
        ("concord train folder/mine.py --revo", ""),
        ("concord submit tr", "train"),
        ("concord submit train syn", "synthetic"),
        ("concord submit train synthetic --fol", "--follow"),
        ("concord report synthetic --only", "--only-studies"),
        ("concord compare synthetic --first", "--first-seed --first-order"),
        ("concord compare colored-mnist table-1", "table-1"),
        ("concord compare synthetic --config dat", "data.csv"),
        ("concord tune coinrun-expert --ent", "--entropy"),
        ("concord models pro", "promote"),
        ("concord runs --status f", "failed finished"),
    ],
)
def test_bash_completes_commands_jobs_options_and_values(
    completed: Callable[[str], list[str]], words: str, expected: str
) -> None:
    assert completed(words) == expected.split()


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_completes_what_is_typed(scripts: dict[str, Path]) -> None:
    shell, terminal = pty.fork()
    if shell == 0:
        os.execvp("zsh", ["zsh", "-f", "-i"])

    def seen_until(mark: bytes) -> bytes:
        seen = b""
        while mark not in seen and select.select([terminal], [], [], 20)[0]:
            seen += os.read(terminal, 65536)
        return seen

    try:
        os.write(terminal, f"source {scripts['zsh']}; concord() {{ print \"<$*>\" }}; print REA''DY\n".encode())
        seen_until(b"READY")
        os.write(terminal, b"concord tra\tsyn\t--obj\tmm-r\t\n")
        assert b"<train synthetic --objective mm-rex>" in seen_until(b">\r")
    finally:
        os.kill(shell, signal.SIGKILL)
        os.waitpid(shell, 0)
        os.close(terminal)


def test_a_script_says_where_to_put_it_and_other_shells_are_refused(
    concord_: Concord, refused: Callable[..., str], scripts: dict[str, Path]
) -> None:
    assert concord_("--completion", "bash").out == scripts["bash"].read_text()
    assert "bash-completion/completions/concord" in scripts["bash"].read_text().splitlines()[1]
    assert refused("--completion", "fish") == "--completion fish: must be one of bash, zsh"
    assert refused("--completion") == "--completion: must be one of bash, zsh"
