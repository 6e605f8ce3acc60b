"""Completion with Tab, of commands, jobs, options and their values: a script for a shell, made of what there is now.

The script is read by the shell alone: to find a job's options takes seconds, so they are found when it is written.
tyro's own completion is of one dataclass; here the options depend on the command and on the job, a file's too.
"""

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import concord
from concord.cli import COMMANDS
from concord.cli.cluster import SUBMITTED, Submit
from concord.cli.config_file import ConfigFile
from concord.cli.help import option_help
from concord.cli.job_options import JOB_COMMANDS, default_options
from concord.errors import InputError
from concord.job_files import built_in_jobs
from concord.studies.comparison_plan import METHODS, comparisons_of
from concord.training import TrainConfig
from concord.training.job import load_job

_INSTALL = {
    "bash": "concord --completion bash > ~/.local/share/bash-completion/completions/concord",
    "zsh": "concord --completion zsh > ~/.concord.zsh; echo 'source ~/.concord.zsh' >> ~/.zshrc",
}
_ZSH = "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"
_OWN_FILE = "FILE.py"  # a job that is a file of the user's
_FILES = "@files"
_ALWAYS = ("--help", "--help-all", "--json")

_SCRIPT = """\
# Completes concord {version} in {shell}. To install it, also after an upgrade, and then open a new shell:
#   {install}
{beginning}
# What may follow a command: words, files, and options with their values after a "=", if they take any.
_concord_following() {{
    case "$1" in
{following}
        *) return 1 ;;
    esac
}}

_concord() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="" found=""
    local at word next
    for ((at = 1; at < COMP_CWORD; at++)); do
        next="$command ${{COMP_WORDS[at]}}"
        case "$next" in
            {own_files}) next="$command {own_file}" ;;
        esac
        _concord_following "$next" > /dev/null && command="$next"
    done
    for word in $(_concord_following "$command"); do
        case "$word" in
            "$previous="*)
                found="${{word#*=}}"
                break
                ;;
            *) found="$found ${{word%%=*}}" ;;
        esac
    done
    COMPREPLY=()
    case "$found" in
        *{files}*) compopt -o default 2> /dev/null || COMPREPLY=($(compgen -f -- "$current")) ;;
    esac
    found="${{found//{files}/}}"
    COMPREPLY+=($(compgen -W "${{found//|/ }}" -- "$current"))
}}

complete -F _concord concord
"""


def completion(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Print the script for a shell."""
    if len(words) != 1 or words[0] not in _INSTALL:
        raise InputError(f"--completion{''.join(f' {word}' for word in words)}: must be one of {', '.join(_INSTALL)}")
    text = script(words[0])
    if not as_json:
        print(text, end="")
    return {"shell": words[0], "script": text}


def script(shell: str) -> str:
    """The script for ``bash`` or ``zsh``."""
    following = _following()
    own_files = [command.removesuffix(_OWN_FILE) for command in following if command.endswith(_OWN_FILE)]
    return _SCRIPT.format(
        version=concord.__version__,
        shell=shell,
        install=_INSTALL[shell],
        beginning=_ZSH if shell == "zsh" else "",
        following="\n".join(f'        "{command}") echo "{" ".join(following[command])}" ;;' for command in following),
        own_files=" | ".join(f'"{command}"*.py' for command in own_files),
        own_file=_OWN_FILE,
        files=_FILES,
    )


def _following() -> dict[str, list[str]]:
    """What may follow the words that name a command and a job."""
    jobs = {name: load_job(name) for name in built_in_jobs()}
    following = {"": [*COMMANDS, "--help", "--version", f"--completion={'|'.join(_INSTALL)}"]}
    for command, module in COMMANDS.items():
        kind = getattr(importlib.import_module(module), command.capitalize(), None)
        following[f" {command}"] = _words(kind) if kind is not None else [*jobs, _FILES, *_ALWAYS]
    for command in JOB_COMMANDS:
        of_jobs = {_OWN_FILE: _words(TrainConfig)}
        for name, job in jobs.items():
            with contextlib.suppress(InputError):  # the command can do nothing with this job
                defaults = default_options(command, job, name)
                of_jobs[name] = _words(type(defaults), defaults)
                of_jobs[name] += [*comparisons_of(job), METHODS] if command == "compare" else []
        file = _words(ConfigFile) if command in ("train", "tune", "compare") else []
        following |= {f" {command} {job}": [*words, *file] for job, words in of_jobs.items()}
        if command in SUBMITTED:
            following[f" submit {command}"] = following[f" {command}"]
            submit = _words(Submit)
            following |= {f" submit {command} {job}": [*words, *submit] for job, words in of_jobs.items()}
    following[" submit"] += SUBMITTED
    return following


def _words(kind: type[Any], default: Any = None) -> list[str]:
    """The options of a dataclass."""
    words = list(_ALWAYS)
    for option in option_help(kind, default):
        values = "|".join(option.choices) or (_FILES if option.takes.startswith("PATH") else "")
        words += [f"{flag}={values}" if option.takes else flag for flag in option.flags] or option.choices
    return words
