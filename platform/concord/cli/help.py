"""Help on one screen: the jobs, and one line for each of a job's main options.

tyro's own help, ``--help-all``, needs two lines for most options and more than a screen.
"""

import contextlib
import re
import shutil
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from concord.job_files import JobText, job_texts
from concord.options import options_of

# The platform's options that a newcomer needs; --help-all shows the others.
FIRST_OPTIONS = (
    *("epochs", "batch_size", "lr", "optimizer", "objective", "aggregator", "threshold"),
    *("seed", "workers", "use_gpu", "data_dir", "output", "name", "resume"),
)
HELP = frozenset({"-h", "--help", "--help-all"})
_TEXT_COLUMN = 28


@dataclass(frozen=True)
class OptionHelp:
    """An option of a command.

    Attributes:
        flags: such as ``("--rescale", "--no-rescale")``.
        takes: the kind of its value, such as ``FLOAT``; empty for a flag.
        choices: its possible values, if they are few.
        default: the default; empty if there is none.
    """

    flags: tuple[str, ...]
    takes: str
    choices: tuple[str, ...]
    text: str
    default: str

    def lines(self, width: int) -> Iterable[str]:
        """The option with its default in a line of this width, its text shortened to fit, and its choices below."""
        value = self.default or self.takes
        flag = "--[no-]" + self.flags[0].removeprefix("--") if value == "True" else f"{self.flags[0]} {value}".rstrip()
        start = f"  {flag}".ljust(_TEXT_COLUMN - 2) + "  "
        yield start + textwrap.shorten(self.text, width - len(start), placeholder=" …", break_on_hyphens=False)
        if self.choices:
            indent = " " * _TEXT_COLUMN
            yield from textwrap.wrap(
                ", ".join(self.choices), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )


def option_help(kind: type[Any], default: Any) -> dict[str, OptionHelp]:
    """The options of a dataclass, by the names of its fields."""
    import tyro

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(kind, config=(tyro.conf.OmitArgPrefixes,), default=default)
    # argparse has no public list of a parser's options.
    named = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    return {each.option_strings[0].removeprefix("--").replace("-", "_"): _option(each) for each in named}


def _option(action: Any) -> OptionHelp:
    """An option from argparse's form of it."""
    text, _, default = str(action.help or "").removesuffix(")").rpartition(" (default: ")
    choices = shown_choices(action.choices or ())
    takes = "NAME" if choices else str(action.metavar or "").removeprefix("{None}|")
    if several := re.search(r"\[(\w+) \[", takes):
        takes = f"{several[1]} …"
    if default in {"None", "False"}:
        default = ""
    with contextlib.suppress(ValueError):
        default = f"{float(default):.4g}" if "." in default else default
    return OptionHelp(tuple(action.option_strings), takes, tuple(choices), " ".join(text.split()), default)


def shown_choices(choices: Iterable[Any]) -> list[str]:
    """The choices as text, without the None of an optional option, whose choices tyro gives in any order."""
    shown = list(map(str, choices))
    return sorted({*shown} - {"None"}) if "None" in shown else shown


def job_help(command: str, job: Any, tables: Sequence[str], program: str, options: Any) -> str:
    """The help of a job's command: the command's own options, the job's, and for ``train`` the first of every run."""
    from concord.studies.comparison_plan import LEAVE_ONE_OUT, METHODS, comparisons_of
    from concord.training.options import RunConfig, TrainConfig

    platform = options_of(TrainConfig if isinstance(job.job.config, TrainConfig) else RunConfig)
    declared = options_of(type(job.job.config))
    own = [name for name, option in declared.items() if name not in platform and not option.detail]
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
    known = option_help(type(options), options)
    width = max(shutil.get_terminal_size().columns, 80)
    lines = [f"usage: {program} [--option value] …", "", *textwrap.wrap(title, width)]
    for heading, names in sections.items():
        shown = [line for name in names if name in known for line in known[name].lines(width)]
        lines += ["", heading, *shown] if shown else []
    return "\n".join([*lines, "", f"{program} --help-all explains all {len(known)} options in full."])


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
