"""Help on one screen: the jobs, and one line for each of a job's main options.

tyro's own help, ``--help-all``, needs two lines for most options and more than a screen.
"""

import contextlib
import re
import shutil
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from concord.job_files import JobText, job_texts
from concord.options import options_of

# The platform's options that a newcomer needs; --help-all shows the others.
FIRST_OPTIONS = (
    *("epochs", "batch_size", "lr", "optimizer", "objective", "aggregator", "threshold"),
    *("seed", "workers", "device", "data", "output", "name", "resume"),
)
HELP = frozenset({"-h", "--help", "--help-all"})
_TEXT_COLUMN = 28


@dataclass(frozen=True)
class OptionHelp:
    """An option of a command.

    Attributes:
        flags: such as ``("--rescale", "--no-rescale")``; the name of an argument without a flag.
        takes: the kind of its value, such as ``FLOAT``; empty for a flag.
        choices: its possible values, if they are few.
        default: the default; empty if there is none.
        required: whether it is an argument without a flag that has to be given.
    """

    flags: tuple[str, ...]
    takes: str
    choices: tuple[str, ...]
    text: str
    default: str
    required: bool = False

    def lines(self, width: int) -> Iterable[str]:
        """The option in a line of this width: default, and text cut to fit; below, choices that the text lacks."""
        value = self.default or self.takes
        flag = "--[no-]" + self.flags[0].removeprefix("--") if value == "True" else f"{self.flags[0]} {value}".rstrip()
        start = f"  {flag}".ljust(_TEXT_COLUMN - 2) + "  "
        text = textwrap.shorten(self.text, width - len(start), placeholder=" …", break_on_hyphens=False)
        yield start + text
        if not all(choice in text for choice in self.choices):
            indent = " " * _TEXT_COLUMN
            yield from textwrap.wrap(
                ", ".join(self.choices), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )


def option_help(kind: type[Any], **settings: Any) -> dict[str, OptionHelp]:
    """The options of a dataclass, by the names of its fields; ``settings`` are tyro's, such as ``default``."""
    import tyro

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(kind, config=(tyro.conf.OmitArgPrefixes,), **settings)
    # argparse has no public list of a parser's options.
    options = [_option(action) for action in parser._actions if action.dest != "help"]
    return {each.flags[0].removeprefix("--").replace("-", "_").lower(): each for each in options}


def _option(action: Any) -> OptionHelp:
    """An option from argparse's form of it."""
    text, *defaults = re.split(r" \((?:default: (.*)|required)\)$", str(action.help or ""), flags=re.DOTALL)
    default = next(filter(None, defaults), "")
    choices = shown_choices(action.choices or ())
    takes = "NAME" if choices else str(action.metavar or "").removeprefix("{None}|")
    if several := re.search(r"\[(\w+) \[", takes):
        takes = f"{several[1]} …"
    if default in {"None", "False"}:
        default = ""
    with contextlib.suppress(ValueError):
        default = f"{float(default):.4g}" if "." in default else default
    flags = tuple(action.option_strings) or (str(action.dest).upper(),)
    required = not action.option_strings and action.nargs != "?"
    takes = takes if action.option_strings else ""
    return OptionHelp(flags, takes, tuple(choices), " ".join(text.split()), default, required)


def shown_choices(choices: Iterable[Any]) -> list[str]:
    """The choices as text, without the None of an optional option, whose choices tyro gives in any order."""
    shown = list(map(str, choices))
    return sorted({*shown} - {"None"}) if "None" in shown else shown


def job_help(command: str, job: Any, tables: Sequence[str], program: str, options: Any) -> str:
    """The help of a job's command: the command's own options, the job's, and for ``train`` the first of every run."""
    from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS, comparisons_of
    from concord.training.options import RunConfig, TrainConfig

    platform = options_of(TrainConfig if isinstance(job.job.config, TrainConfig) else RunConfig)
    declared = options_of(type(job.job.config))
    own = [name for name, option in declared.items() if option != platform.get(name) and not option.detail]
    title = " ".join(str(type(options).__doc__).split())
    if command == "train":
        title = JobText(job.name, job.source).title or str(job.job.config.__doc__).split("\n")[0]
        first = [name for name in FIRST_OPTIONS if name not in own]
        sections = {f"options of {job.name}, and their defaults": own, "first options of every run": first}
    else:
        if command == "compare" and not {METHODS, LEAVE_ONE_OUT} & {*tables}:
            named = ", ".join(comparisons_of(job)) if job.job.comparisons else "none"
            title += (
                f" Tables of this job: {named}; {METHODS} tunes each method instead, and {LEAVE_ONE_OUT} leaves out"
            )
            title += " each environment in turn."
        groups = {name: option.groups[:2] for name, option in options_of(type(options)).items()}
        of_command = [name for name, group in groups.items() if group[0] == "options" and group[1] != "config"]
        sections = {f"options of {command}, and their defaults": of_command, f"options of {job.name}": own}
    known = option_help(type(options), default=options)
    return _page(f"{program} [--option value] …", program, title, sections, known)


def command_help(kind: type[Any], program: str, settings: Mapping[str, Any]) -> str:
    """The help of a command with these options; ``settings`` are tyro's, such as ``default``."""
    known, declared = option_help(kind, **settings), options_of(kind)
    named = {name for name, option in known.items() if option.flags[0].startswith("-")}
    shown = [name for name in known if name not in declared or not declared[name].detail]
    arguments = [name for name in shown if name not in named]
    words = [known[name].flags[0] if known[name].required else f"[{known[name].flags[0]}]" for name in arguments]
    sections = {"arguments": arguments, "options, and their defaults": [name for name in shown if name in named]}
    usage = " ".join([program, *words, *(["[--option value] …"] if named else [])])
    return _page(usage, program, " ".join(str(kind.__doc__).split()), sections, known)


def _page(
    usage: str, program: str, title: str, sections: Mapping[str, Sequence[str]], known: Mapping[str, OptionHelp]
) -> str:
    width = max(shutil.get_terminal_size().columns, 80)
    lines = [f"usage: {usage}", "", *textwrap.wrap(title, width)]
    for heading, names in sections.items():
        shown = [line for name in names if name in known for line in known[name].lines(width)]
        lines += ["", heading, *shown] if shown else []
    if known:
        lines += ["", f"{program} --help-all explains all {len(known)} options in full."]
    return "\n".join(lines)


def job_list(command: str) -> str:
    """The list of jobs for a command."""
    texts = [text for text in job_texts() if command != "data" or "data" in text.parts]
    column = max(len(text.name) for text in texts) + 4
    width = shutil.get_terminal_size().columns
    lines = [
        textwrap.fill(text.title, width, initial_indent=f"  {text.name:<{column - 2}}", subsequent_indent=" " * column)
        for text in texts
    ]
    last = f"JOB is one of these, or a Python file of your own. concord {command} JOB --help shows its options."
    return "\n".join([f"usage: concord {command} JOB [--option value] …", "", *lines, "", last])
