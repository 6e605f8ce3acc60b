"""A command's options from its words; what is wrong with them becomes one line."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from concord.cli.help import HELP, Brief, job_list, option_help
from concord.cli.output import info
from concord.errors import InputError
from concord.job_files import built_in_jobs
from concord.options import NEEDED, OptionGroup, did_you_mean, option_values, options_of, require_one_way

Options = TypeVar("Options")


def parse(
    options: type[Options],
    words: Sequence[str],
    program: str,
    default: Options | None = None,
    brief: Brief | None = None,
) -> Options:
    """The options in these words; what is wrong with them becomes one line.

    Args:
        options: a dataclass.
        words: the words.
        program: the command that they were given to.
        default: values of what is not given, if they are not the dataclass's.
        brief: what ``--help`` shows; without it, ``--help`` shows everything as ``--help-all`` does.
    """
    import tyro
    from tyro import _errors as tyro_errors

    def refuse(event: Any) -> None:
        raise InputError(_one_line(event, [option.flag for option in options_of(options).values()]))

    if brief is not None and "--help-all" not in words and asks_for_help(words):
        print(brief.text(program, option_help(options, default)))
        raise SystemExit(0)
    given: dict[str, Any] = {}
    if default is not None:
        given["default"] = _with_missing(default)
    words = ["--help" if word == "--help-all" else word for word in words]
    with tyro_errors.on_parse_error(refuse):
        parsed: Options = tyro.cli(options, prog=program, args=words, config=(tyro.conf.OmitArgPrefixes,), **given)
    if not isinstance(parsed, OptionGroup):
        return parsed
    values = {name: value for name, value in option_values(parsed).items() if name in given_options(options, words)}
    require_one_way(values)
    return parsed.with_options(**values)  # which changes what they imply


def _with_missing(default: Any) -> Any:
    """With what tyro calls a value that has to be given."""
    import tyro

    needed = [name for name, value in option_values(default).items() if value is NEEDED]
    return default.with_options(**dict.fromkeys(needed, tyro.MISSING)) if needed else default


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the words ask what there is to give."""
    return not HELP.isdisjoint(words)


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
            near = did_you_mean(first.split("=")[0].lower(), known) or ";"
            return f"{' '.join(event.tokens)}: there is no such option{near} {event.prog} --help lists them"
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
            # Of an option that may be left out, why it is no None is said, too.
            given = re.search(r"could be instantiated from (\[.*?\])", message)
            value = " ".join(re.findall(r"'([^']*)'", given.group(1) if given else message))
            return f"{option} {value}: must be {kind}" if metavar in _KINDS else f"{option}: {message}"
        case _:
            return f"{' '.join(event.prog.split())}: the options are incomplete or contradict one another; see --help"


def job_and_words(words: Sequence[str], command: str) -> tuple[Any, list[str]]:
    """The job that the first word names, and the other words; without any, the jobs there are are listed."""
    if words and words[0] in HELP:
        print(job_list(command))
        raise SystemExit(0)
    if not words:
        info(job_list(command))
    if not words or words[0].startswith("-"):
        raise InputError(f"{command}: which job? one of {', '.join(built_in_jobs())}, or a Python file")
    from concord.training.job import load_job

    return load_job(words[0]), list(words[1:])


def given_options(options: type[Any], words: Sequence[str]) -> set[str]:
    """The options that these words name."""
    names = options_of(options).keys()
    named = {word.removeprefix("--").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return (named | {name.removeprefix("no_") for name in named}) & names


def option_of(word: str) -> str:
    """The option a word names, as it is usually written; empty if it names none."""
    return word.split("=")[0].replace("_", "-") if word.startswith("--") else ""


def option_value(words: Sequence[str], option: str) -> str | None:
    """What the words give for an option; the last one counts."""
    found = None
    for place, word in enumerate(words):
        if option_of(word) == option:
            found = word.split("=", 1)[1] if "=" in word else "".join(words[place + 1 : place + 2])
    return found


def without_options(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words without these options and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        if option_of(word) in options:
            skip = "=" not in word
            continue
        kept.append(word)
    return kept


def replaced_option(words: Sequence[str], option: str, value: str) -> list[str]:
    """The words with another value for an option."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and option_of(word) != option:
            kept.append(word)
        skip = not skip and option_of(word) == option and "=" not in word
    return [*kept, option, value]


def with_own_rule(job: Any, words: Sequence[str], record: Mapping[str, Any] | None = None) -> tuple[Any, list[str]]:
    """The job with the rule of the user's own that it is to be trained with, and the words that say so.

    Args:
        job: the job with its file.
        words: the options.
        record: of the run or study that goes on; its rule counts where the words name none.

    Returns:
        The job, whose options have the rule's fields, and the words with the rule as its options call it. Where no rule
        of the user's own is meant, job and words as they are.

    Raises:
        InputError: the rule cannot be used.
    """
    from concord.aggregation.rule_file import RuleFile

    given = option_value(words, "--aggregator")
    if given is not None:
        if not RuleFile.is_reference(given):
            return job, list(words)
        job = _with_rule(job, RuleFile.read(given))
        return job, replaced_option(words, "--aggregator", job.rule.reference)
    recorded = str((record or {}).get("config", {}).get("aggregator"))
    if record is None or not RuleFile.is_reference(recorded):
        return job, list(words)
    file, name = RuleFile.parts(recorded)
    return _with_rule(job, RuleFile(file, record["sources"][file], name)), list(words)


def _with_rule(job: Any, rule: Any) -> Any:
    from concord.training.job import with_rule

    return with_rule(job, rule)
