"""A command's options from its words; what is wrong with them becomes one line."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import tyro
from tyro import _errors as tyro_errors

from concord.errors import InputError

Options = TypeVar("Options")


def parse(options: type[Options], words: Sequence[str], program: str, default: Options | None = None) -> Options:
    """The options in these words; what is wrong with them becomes one line."""

    def refuse(event: Any) -> None:
        raise InputError(
            _one_line(event, [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(cast(Any, options))])
        )

    given: dict[str, Any] = {} if default is None else {"default": default}
    with tyro_errors.on_parse_error(refuse):
        parsed: Options = tyro.cli(options, prog=program, args=list(words), **given)
    return parsed


# What tyro calls the values of an option, in words.
_KINDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "[INT [INT ...]]": "whole numbers",
    "[FLOAT [FLOAT ...]]": "numbers",
}


def _one_line(event: Any, known: Sequence[str]) -> str:
    """What a parse error is about: the option, the value, and what would be right."""
    lowered = getattr(getattr(event, "argument", None), "lowered", None)
    option = "/".join(getattr(lowered, "name_or_flags", ()) or ())
    if not option.startswith("-"):
        option = event.prog.removeprefix("concord ")
    metavar = str(getattr(lowered, "metavar", None) or "").removeprefix("{None}|")
    kind = _KINDS.get(metavar, metavar)
    match type(event).__name__:
        case "UnrecognizedArgs":
            first = event.tokens[0]
            if not first.startswith("-"):
                return f"{' '.join(event.tokens)}: not expected here; {event.prog} --help lists the options"
            near = difflib.get_close_matches(first.split("=")[0].lower(), known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            return f"{' '.join(event.tokens)}: there is no such option; {meant}{event.prog} --help lists them"
        case "InvalidChoice":
            choices = list(event.choices)
            if "None" in choices:  # of an option that may be left out; its choices come in any order
                choices = sorted({*choices} - {"None"})
            return f"{option} {event.value}: must be one of {', '.join(choices)}"
        case "MissingArgs":
            missing = sorted(each.arg.lowered.name_or_flags[0] for each in event.missing_arguments)
            return f"{', '.join(missing)}: needed; {event.prog} --help says what it is"
        case "BadValue" if event.reason == "too_few_values":
            return f"{option}: needs a value, {kind}"
        case "BadValue":
            return f"{option} {event.offending_value or ''}: {' '.join(str(event.reason).split())}".replace(" :", ":")
        case "InstantiationFailure":
            message = " ".join(event.message.split())
            value = " ".join(re.findall(r"'([^']*)'", message))
            return f"{option} {value}: must be {kind}" if metavar in _KINDS else f"{option}: {message}"
        case _:
            return f"{' '.join(event.prog.split())}: the options are incomplete or contradict one another; see --help"


def job_and_words(words: Sequence[str], command: str) -> tuple[Any, list[str]]:
    """The job that the first word names, and the other words."""
    from concord.training.job import built_in_jobs, load_job

    if not words or words[0].startswith("-"):
        if words and words[0] in {"-h", "--help"}:
            print(f"usage: concord {command} JOB [options]\n\nOptions depend on the job: concord {command} JOB --help")
            raise SystemExit(0)
        raise InputError(f"{command}: which job? one of {', '.join(built_in_jobs())}, or a Python file")
    return load_job(words[0]), list(words[1:])
