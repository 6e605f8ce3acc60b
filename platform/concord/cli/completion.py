"""The command ``completion``: a script by which a shell completes commands, jobs and options.

tyro completes one parser's options; here the options depend on the job, which takes a second to import, so the script
has the names alone, and of a job's command the first options.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from concord.cli.help import FIRST_OPTIONS, option_help
from concord.cli.parsing import parse
from concord.job_files import built_in_jobs
from concord.options import flag_of

# In zsh, which runs bash's completions.
_ZSH = "autoload -Uz compinit bashcompinit && compinit -u && bashcompinit\n"
_SCRIPT = """\
_concord() {{
  local at=1 words="{commands}" current="${{COMP_WORDS[COMP_CWORD]}}"
  [[ ${{COMP_WORDS[1]}} == submit && ${{COMP_WORDS[2]}} != -* ]] && (( COMP_CWORD > 1 )) && at=2
  if (( COMP_CWORD > at )); then
    case "${{COMP_WORDS[at]}}" in
{cases}
    esac
    if [[ $current != -* ]]; then
      words="${{words%%--*}}"
      (( COMP_CWORD == at + 1 )) || words=""
    fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _concord concord
"""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes commands, jobs and options; for this shell: source <(concord completion bash)"""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """bash or zsh."""


def completion(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """A shell's script of completion."""
    from concord.cli import COMMANDS

    options = parse(Completion, words, "concord completion")
    words_after = {name: " ".join([*_words(name, module), "--help", "--json"]) for name, module in COMMANDS.items()}
    cases = "\n".join(f'      {name}) words="{after}";;' for name, after in words_after.items())
    script = _SCRIPT.format(commands=" ".join([*COMMANDS, "--help", "--version"]), cases=cases)
    script = _ZSH + script if options.shell == "zsh" else script
    if not as_json:
        print(script, end="")
    return {"shell": options.shell, "script": script}


def _words(command: str, module: str) -> list[str]:
    """The words after a command: first those that are no options."""
    kind = None if command == "analyze" else getattr(importlib.import_module(module), command.capitalize(), None)
    if kind is None:  # its options depend on the job
        return [*built_in_jobs(), *map(flag_of, FIRST_OPTIONS)]
    options = option_help(kind).values()
    arguments = [choice for each in options if not each.flags[0].startswith("-") for choice in each.choices]
    return [*arguments, *(flag for each in options for flag in each.flags if flag.startswith("-"))]
