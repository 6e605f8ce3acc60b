"""Help on one screen: what there is to run, and of a job's options those that are asked for first, a line each."""

import contextlib
import re
import shutil
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from concord.job_files import JobText, job_texts

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
        flags: as they are written: ``("--rescale", "--no-rescale")``; none for what is given by its place.
        takes: what kind of value, such as ``FLOAT``; empty for a flag.
        choices: the values there are, where there are only some.
        text: what it is for.
        default: its value if it is not given; empty where there is none.
    """

    flags: tuple[str, ...]
    takes: str
    choices: tuple[str, ...]
    text: str
    default: str

    @property
    def name(self) -> str:
        """The name of the dataclass's field."""
        return self.flags[0].removeprefix("--").replace("-", "_") if self.flags else ""

    def lines(self, width: int) -> Iterable[str]:
        """The option with its default in a line of so many letters, its text cut where that is too short."""
        value = self.default or self.takes
        flag = "--[no-]" + self.flags[0].removeprefix("--") if value == "True" else f"{self.flags[0]} {value}".rstrip()
        start = f"  {flag}".ljust(_TEXT_COLUMN - 2) + "  "
        yield start + textwrap.shorten(self.text, width - len(start), placeholder=" …", break_on_hyphens=False)
        if self.choices:
            yield " " * _TEXT_COLUMN + ", ".join(self.choices)


def option_help(kind: type[Any], default: Any = None) -> list[OptionHelp]:
    """The options that a dataclass makes."""
    import tyro

    given = {} if default is None else {"default": default}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(kind, config=(tyro.conf.OmitArgPrefixes,), **given)
    return [_option(action) for action in parser._actions if action.dest != "help"]


def _option(action: Any) -> OptionHelp:
    """An option from argparse's form of it."""
    text, _, default = str(action.help or "").removesuffix(")").rpartition(" (default: ")
    choices = tuple(map(str, action.choices or ()))
    if "None" in choices:  # of an option that may be left out; its choices come in any order
        choices = tuple(sorted({*choices} - {"None"}))
    takes = "NAME" if choices else str(action.metavar or "").removeprefix("{None}|")
    if several := re.search(r"\[(\w+) \[", takes):
        takes = f"{several[1]} …"
    if default in {"None", "False"}:  # of what may be left out, and of flags
        default = ""
    with contextlib.suppress(ValueError):
        default = f"{float(default):.4g}" if "." in default else default
    return OptionHelp(tuple(action.option_strings), takes, choices, " ".join(text.split()), default)


@dataclass(frozen=True)
class Brief:
    """The help of a job's command on one screen.

    Attributes:
        title: what the job is.
        sections: the names of the options to show, by their headings.
    """

    title: str
    sections: Mapping[str, Iterable[str]]

    def text(self, program: str, options: Iterable[OptionHelp]) -> str:
        """The help as it is printed."""
        known = {option.name: option for option in options}
        width = max(shutil.get_terminal_size().columns, 80)
        lines = [f"usage: {program} [--option value] …", "", *textwrap.wrap(self.title, width)]
        for heading, names in self.sections.items():
            shown = [known[name] for name in names if name in known]
            lines += ["", heading, *(line for option in shown for line in option.lines(width))] if shown else []
        lines += ["", f"{program} --help-all explains all {len(known)} options in full."]
        return "\n".join(lines)


def train_brief(job: Any) -> Brief:
    """The help of ``concord train JOB``: the job's own options, and the first of the platform's."""
    own = _own(job)
    first = [name for name in FIRST_OPTIONS if name not in own]
    return Brief(_title(job), {f"options of {job.name}, and their defaults": own, "first options of every run": first})


def tune_brief(job: Any) -> Brief:
    """The help of ``concord tune JOB``: the study's options, and the job's own."""
    from concord.studies.options import StudyOptions

    methods = f" Methods of this job: {', '.join(job.job.studies)}." if job.job.studies else ""
    return _brief_of(StudyOptions, methods, "a study", job)


def compare_brief(job: Any) -> Brief:
    """The help of ``concord compare JOB``: the comparison's options, and the job's own."""
    from concord.studies.comparison_plan import METHODS, comparisons_of
    from concord.studies.options import CompareOptions

    tables = f" Tables of this job: {', '.join(comparisons_of(job))}; {METHODS} tunes each method instead."
    return _brief_of(CompareOptions, tables, "a comparison", job)


def methods_brief(job: Any) -> Brief:
    """The help of ``concord compare JOB methods``: the options of the studies, and the job's own."""
    from concord.studies.methods import MethodsOptions

    return _brief_of(MethodsOptions, "", "the comparison", job)


def _brief_of(kind: type[Any], more: str, what: str, job: Any) -> Brief:
    from concord.options import options_of

    sections = {f"options of {what}, and their defaults": list(options_of(kind)), f"options of {job.name}": _own(job)}
    return Brief(f"{' '.join(str(kind.__doc__).split())}{more}", sections)


def _title(job: Any) -> str:
    return JobText(job.name, job.source).title or str(job.job.config.__doc__).split("\n")[0]


def _own(job: Any) -> list[str]:
    """The names of the options that a job has beside the platform's."""
    from concord.options import options_of
    from concord.training.options import RunConfig, TrainConfig

    platform = options_of(TrainConfig if isinstance(job.job.config, TrainConfig) else RunConfig)
    return [name for name in options_of(type(job.job.config)) if name not in platform]


def job_list(command: str) -> str:
    """What there is to give as the job of a command."""
    texts = [text for text in job_texts() if command != "data" or "data" in text.parts]
    column = max(len(text.name) for text in texts) + 4
    width = shutil.get_terminal_size().columns
    lines = [
        textwrap.fill(text.title, width, initial_indent=f"  {text.name:<{column - 2}}", subsequent_indent=" " * column)
        for text in texts
    ]
    return "\n".join(
        [
            f"usage: concord {command} JOB [--option value] …",
            "",
            *lines,
            "",
            f"JOB is one of these, or a Python file of your own. concord {command} JOB --help shows its options.",
        ]
    )
