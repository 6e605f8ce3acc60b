"""The script of ``concord completion``, in a real shell."""

import subprocess

import pytest
from command_line import Concord

from concord.cli import COMMANDS
from concord.job_files import built_in_jobs

ASK = """
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
_concord
echo "${COMPREPLY[*]}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("concord tr", "train"),
        ("concord train image-d", "image-domains"),
        ("concord train table --da", "--data"),
        ("concord train table patients.c", ""),
        ("concord submit tu", "tune"),
        ("concord submit tune skip", "skip-toy"),
        ("concord submit --no", "--no-wait"),
        ("concord models pro", "promote"),
        ("concord runs --wh", "--where"),
        ("concord runs sy", ""),
    ],
)
def test_bash_completes_commands_jobs_and_options(concord_: Concord, typed: str, offered: str) -> None:
    script = concord_("completion", "bash").out
    shell = ["bash", "-c", script + ASK, "bash", *typed.split()]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout.strip() == offered


def test_both_scripts_name_every_command_and_job(concord_: Concord) -> None:
    for shell in ("bash", "zsh"):
        said = concord_("completion", shell)
        assert all(f" {name}" in said.out or f'"{name}' in said.out for name in [*COMMANDS, *built_in_jobs()])
        assert ("bashcompinit" in said.out) == (shell == "zsh")
