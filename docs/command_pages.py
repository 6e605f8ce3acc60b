"""The page of all commands and options, written from the code: a hook of MkDocs."""

import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import tyro
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from concord.cli import COMMANDS, USAGE
from concord.cli.help import OptionHelp, option_help
from concord.execution.analyzing import AnalyzeOptions
from concord.job_files import job_texts
from concord.options import NEEDED, help_of, options_of
from concord.studies.leave_one_out import LeaveOneOutOptions
from concord.studies.methods import MethodsOptions
from concord.studies.report import ReportOptions
from concord.studies.study_options import CompareOptions, StudyOptions
from concord.training.job import load_job
from concord.training.options import TrainConfig

PAGE = "reference/commands.md"
_INTRO = """\
# Commands and options

This page is made from the code. In Python an option has `_` for `-`: `--batch-size 64` is `batch_size=64` in
`concord.train`, and `--no-rescale` is `rescale=False`. `concord COMMAND JOB --help` shows the first options of a
command on one screen.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """The page in Markdown."""
    return "\n".join([_INTRO, f"```\n{USAGE}\n```\n", *_of_every_run(), *_of_commands(), *_of_jobs()])


def _of_every_run() -> Iterator[str]:
    yield "## Options of every run\n\n`train`, `tune`, `compare` and `submit` take them.\n"
    for field in dataclasses.fields(TrainConfig):
        group = type(getattr(TrainConfig(), field.name))
        yield f"### {field.name.replace('_', ' ').capitalize()}\n\n{help_of(group)}\n"
        yield _table(option_help(group, default=group()).values())


def _of_commands() -> Iterator[str]:
    yield "## Options of commands\n"
    kinds: dict[str, Any] = {
        "tune JOB": StudyOptions,
        "compare JOB [TABLE…]": CompareOptions,
        "compare JOB methods": MethodsOptions,
        "compare JOB leave-one-out": LeaveOneOutOptions,
        "report JOB [TABLE…]": ReportOptions,
        "analyze JOB": AnalyzeOptions,
    }
    kinds |= {
        name: getattr(importlib.import_module(module), name.capitalize(), None) for name, module in COMMANDS.items()
    }
    for name, kind in kinds.items():
        if kind is not None and options_of(kind):
            yield f"### concord {name}\n\n{inspect.cleandoc(kind.__doc__ or '').partition(chr(10) * 2)[0]}\n"
            yield _table(option_help(kind, default=_defaults(kind)).values())


def _defaults(kind: type[Any]) -> Any:
    """An instance with the defaults; an option that has none gets tyro's marker."""
    return kind(**{name: tyro.MISSING for name, option in options_of(kind).items() if option.default is NEEDED})


def _of_jobs() -> Iterator[str]:
    yield "## Options of the built-in jobs\n\nBeside those of every run.\n"
    for text in job_texts():
        yield f"### {text.name}\n\n{text.title}\n"
        config = load_job(text.name).job.config
        platform = options_of(TrainConfig)
        own = {name: each for name, each in option_help(type(config), default=config).items() if name not in platform}
        yield _table(own.values()) if own else "No options of its own.\n"


def _table(options: Iterable[OptionHelp]) -> str:
    """The options in a table of Markdown."""
    rows = ["| option | default | |", "|---|---|---|"]
    for each in options:
        flag = f"`{' '.join([' / '.join(each.flags), each.takes]).strip()}`"
        text = each.text.replace("%%", "%") + (f" One of {', '.join(each.choices)}." if each.choices else "")
        cells = [flag, f"`{each.default}`" if each.default else "", text]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*rows, ""])
