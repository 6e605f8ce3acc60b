"""Parses a command's options; an error becomes one line."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from concord.cli.help import HELP, command_help, job_list, option_help, shown_choices
from concord.errors import InputError
from concord.job_files import built_in_jobs
from concord.logs import info
from concord.options import (
    NEEDED,
    OptionGroup,
    did_you_mean,
    flag_of,
    option_values,
    options_of,
    path_of,
    require_one_way,
    takes_several,
)

Options = TypeVar("Options")


def parse(
    options: type[Options],
    words: Sequence[str],
    program: str,
    default: Options | None = None,
    brief: Callable[[], str] | None = None,
    around: type[Any] | None = None,
) -> Options:
    """Parse options; an error becomes one line.

    ``brief`` returns the text of ``--help``, which :func:`command_help` makes by default; that of ``--help-all`` is
    tyro's. ``around`` has the options of another command, which may be meant as well.
    """
    settings = {} if default is None else {"default": _with_missing(default)}
    if "--help-all" not in words and asks_for_help(words):
        print(command_help(options, program, settings) if brief is None else brief())
        raise SystemExit(0)
    words = ["--help" if word == "--help-all" else word for word in words]
    parsed: Options = _parse(options, words, program, settings, around)
    if not isinstance(parsed, OptionGroup):
        return parsed
    values = {name: value for name, value in option_values(parsed).items() if name in given_options(options, words)}
    require_one_way(values)
    return parsed.with_options(**values)  # which sets implied options


def parse_known(options: type[Options], words: Sequence[str], program: str) -> tuple[Options, list[str]]:
    """Parse these options at any position; return them and the other words."""
    found: tuple[Options, list[str]] = _parse(options, words, program, {"return_unknown_args": True, "add_help": False})
    return found


def _parse(
    options: type[Any],
    words: Sequence[str],
    program: str,
    settings: Mapping[str, Any],
    around: type[Any] | None = None,
) -> Any:
    import tyro
    from tyro import _errors as tyro_errors  # tyro's errors are private

    def refuse(event: Any) -> None:
        raise InputError(_one_line(event, options, around))

    _require_once(options, words)
    with tyro_errors.on_parse_error(refuse):
        return tyro.cli(
            options, prog=program, args=words, config=(tyro.conf.OmitArgPrefixes,), registry=_paths(), **settings
        )


def _paths() -> Any:
    """How tyro reads a path."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def read(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
        if kind.type is not Path:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=lambda words: path_of(words[0]),
            is_instance=lambda value: isinstance(value, Path),
            str_from_instance=lambda path: [str(path)],
        )

    return registry


def _require_once(options: type[Any], words: Sequence[str]) -> None:
    """Refuse an option of several values that is given twice: only the values of the last would count (InputError)."""
    flags = [flag_of(word.removeprefix("--").split("=")[0].replace("-", "_")) for word in words if word[:2] == "--"]
    for option in options_of(options).values():
        if flags.count(option.flag) > 1 and takes_several(option.hint):
            raise InputError(f"{option.flag}: is given twice; give all values after one {option.flag}")


def _with_missing(default: Any) -> Any:
    """The defaults with tyro's marker for required options."""
    import tyro

    needed = [name for name, value in option_values(default).items() if value is NEEDED]
    return default.with_options(**dict.fromkeys(needed, tyro.MISSING)) if needed else default


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the words ask for help."""
    return not HELP.isdisjoint(words)


# tyro's names of value types, in words.
_KINDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "PATH": "a path",
    "[INT [INT ...]]": "whole numbers",
    "[FLOAT [FLOAT ...]]": "numbers",
}


def _one_line(event: Any, options: type[Any], around: type[Any] | None) -> str:
    """A parse error in one line: the option, the value, and what is expected."""
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
                return f"{' '.join(event.tokens)}: is not an option; {event.prog} --help lists the options"
            known = {**options_of(options), **({} if around is None else options_of(around))}
            near = did_you_mean(first.split("=")[0], map(flag_of, known)) or ";"
            return f"{' '.join(event.tokens)}: there is no such option{near} {event.prog} --help lists them"
        case "InvalidChoice":
            choices = shown_choices(event.choices)
            return f"{option} {event.value}: must be one of {', '.join(choices)}{did_you_mean(event.value, choices)}"
        case "MissingArgs":
            missing = sorted(each.arg.lowered.name_or_flags[0] for each in event.missing_arguments)
            if not missing[0].startswith("-"):
                needed = option_help(options)[missing[0]]
                return f"{option}: needs {needed.flags[0]}, {needed.text[:1].lower()}{needed.text[1:]}"
            return f"{', '.join(missing)}: is required; {event.prog} --help explains it"
        case "BadValue" if event.reason == "too_few_values":
            return f"{option}: needs a value, {kind}"
        case "BadValue":
            return f"{option} {event.offending_value or ''}: {' '.join(str(event.reason).split())}".replace(" :", ":")
        case "InstantiationFailure":
            message = " ".join(event.message.split())
            # For optional options the message also explains why the value is not None.
            given = re.search(r"could be instantiated from (\[.*?\])", message)
            value = " ".join(re.findall(r"'([^']*)'", given.group(1) if given else message))
            return f"{option} {value or quote(value)}: must be {kind}" if metavar in _KINDS else f"{option}: {message}"
        case _:
            return f"{' '.join(event.prog.split())}: the options are incomplete or contradict one another; see --help"


def job_and_words(words: Sequence[str], command: str) -> tuple[Any, list[str]]:
    """The job named by the first word, and the other words; without a word the error lists the jobs."""
    if words and words[0] in HELP:
        print(job_list(command))
        raise SystemExit(0)
    if not words:
        for line in job_list(command).splitlines():
            info(line)
    if not words or words[0].startswith("-"):
        raise InputError(f"{command}: no job is named; give one of {', '.join(built_in_jobs())}, or a Python file")
    from concord.training.job import load_job

    return load_job(words[0]), list(words[1:])


def given_options(options: type[Any], words: Sequence[str]) -> set[str]:
    """The names of the options in these words."""
    names = options_of(options).keys()
    named = {word.removeprefix("--").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return (named | {name.removeprefix("no_") for name in named}) & names
