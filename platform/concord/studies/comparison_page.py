"""The page of a comparison: the answer, its tables, the columns that hold, the data, how it was obtained, the commands.

A part without material is left out: a table without folds has no environments, a job without rows no columns.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import concord
from concord.analysis.method_names import method_name
from concord.analysis.uncertainty import Verdict
from concord.execution.lifecycle import Info
from concord.execution.progress import duration
from concord.options import option_values
from concord.record import Run
from concord.studies.data_sections import Rows, columns_parts, data_parts, rows_of
from concord.studies.environment_grids import EnvironmentGrids, other_measures
from concord.studies.job_tables import LEAVE_ONE_OUT
from concord.studies.leave_one_out import CHOSEN, known_of_environments
from concord.studies.methods_result import options_of_study
from concord.studies.page import (
    MOST_NAMED,
    MOST_ROWS,
    Command,
    Facts,
    Folded,
    Grid,
    Lines,
    Page,
    Part,
    Picture,
    Section,
    cells_of,
)
from concord.studies.recommendation import MethodsResult
from concord.table import format_value
from concord.tracking.registry import CHAMPION, serve_command
from concord.training.comparison import Folds
from concord.training.job import JobFile

if TYPE_CHECKING:
    from concord.studies.comparison_run import ComparisonResult

REPORT = "report.html"  # in the folder of a comparison
_FEW = 50  # rows, of which a value is rough


def comparison_page(results: "Sequence[ComparisonResult]", info: Info) -> Page:
    """The page of tables of a job, of which some runs are there; ``info`` takes the reason for a missing part."""
    plan = results[0].plan
    runs = _runs(results)
    rows = rows_of(plan.job, plan.base, runs, info)
    names = [table.name for result in results for table in result.tables]
    how = [part for result in results for part in _how(result)]
    title = f"{plan.job.name}: {', '.join(names)}"
    if (table := rows.table) is not None and names == [LEAVE_ONE_OUT]:
        title = f"Predicting {table.target}: will it hold in a new {table.environment.name}?"
    return Page(
        title,
        _about(runs),
        [
            Section("The answer", [part for result in results for part in _answer(result, rows)]),
            *(section for result in results for section in _tables(result)),
            Section("Which columns hold", columns_parts(rows)),
            Section("The data", data_parts(plan.base, rows, runs)),
            Section("How it was obtained", [*how, _origin(plan.experiment, plan.name, runs)]),
            Section("Limits", [part for result in results for part in _limits(result)]),
            Section("Commands", [part for result in results for part in _commands(result)]),
        ],
    )


def methods_page(job: JobFile, result: MethodsResult, again: str, info: Info) -> Page:
    """The page of a comparison of methods; ``again`` is the command that repeats it."""
    trials = [trial for study in result.studies.values() for trial in (*study.ended, *study.repeated)]
    runs = [run for trial in trials for run in trial.runs]
    first = next(iter(result.studies.values()))
    base = options_of_study(job, first)
    rows = rows_of(job, base, runs, info)
    header, cells = result.table().cells()
    caption = "Mean ± standard deviation over new seeds, the best first. The test chose nothing."
    table = Grid(caption, header, [cells_of(row) for row in cells], numeric=False)
    answer = [Lines(_verdict_lines(result.verdict) or result.lines()[:1], lead=True)]
    names = ", ".join(study.record["name"] for study in result.studies.values())
    return Page(
        f"{job.name}: which method?",
        _about(runs),
        [
            Section("The answer", answer),
            Section("The methods", [table, Lines(result.lines()[1:])]),
            Section("Which columns hold", columns_parts(rows)),
            Section("The data", data_parts(base, rows, runs)),
            Section("How it was obtained", [_origin(first.record["tracking"]["experiment"], names, runs)]),
            Section(
                "Commands",
                [
                    Command("Repeat the comparison; what is there is not trained again:", again),
                    *_use(result.recommended, result.train, first.record["store"], job.model_name(base)),
                ],
            ),
        ],
    )


def _about(runs: Sequence[Run]) -> str:
    ended = _day(max(run.ended_at for run in runs))
    return f"Concord {concord.__version__}; {len(runs)} trainings, the last of {ended}"


def _runs(results: "Sequence[ComparisonResult]") -> list[Run]:
    found = (run for result in results for rows in result.runs.values() for row in rows.values() for run in row)
    return list({run.name: run for run in found}.values())


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


# ---- the answer, the tables and their figures


def _answer(result: "ComparisonResult", rows: Rows) -> list[Part]:
    """The verdict in words, and which columns say the opposite where the recommended method fails."""
    lines = _verdict_lines(result.verdict)
    if result.verdict is not None:
        lines += rows.turned_in(result.verdict.below or [])
    lead, more = lines[:MOST_NAMED], lines[MOST_NAMED:]
    parts: list[Part] = [Lines(lead, lead=True)] if lead else []
    return [*parts, *([Folded(f"{len(more)} more lines", [Lines(more)])] if more else [])]


def _verdict_lines(verdict: Verdict | None) -> list[str]:
    return [] if verdict is None else [line[:1].upper() + line[1:] for line in verdict.lines]


def _tables(result: "ComparisonResult") -> list[Section]:
    """A section for each table that has runs, with its figures."""
    sections = []
    for table in result.tables:
        comparison = result.plan.tables[table.name]
        if not table.runs:
            continue
        if (folds := comparison.folds) is None:
            header, rows = table.cells()
            caption = table.title or "Mean ± standard deviation over seeds."
            parts: list[Part] = [Grid(caption, header, [cells_of(row) for row in rows])]
            folded: list[Part] = []
        else:
            parts, folded = EnvironmentGrids(table, comparison.configurations, folds, result.verdict).parts()
            folded += other_measures(result.predictions, folds, result.verdict)
        drawn = [Path(path) for name, path in result.drawn.items() if name in comparison.figures]
        parts += [*(Picture(path.read_bytes(), _caption(path.stem, folds)) for path in drawn), *folded]
        sections.append(Section(table.name if folds is None else "In each environment, as a new one", parts))
    return sections


def _caption(figure: str, folds: Folds | None) -> str:
    if folds is None:
        return figure
    return f"The {folds.measure} of each method in each environment where it is left out, the mean over seeds."


# ---- how it was obtained, limits and commands


def _how(result: "ComparisonResult") -> list[Part]:
    """What was trained, what chose, and the settings of each configuration."""
    parts: list[Part] = []
    usual = option_values(result.plan.job.job.config)
    for table in result.tables:
        comparison = result.plan.tables[table.name]
        seeds = sorted({run.seed for run in table.runs})
        counted = f"{len(comparison.configurations)} configurations with seeds {', '.join(map(str, seeds))}"
        parts.append(Lines([f"{table.name}: {counted}.", *_folds_in_words(comparison.folds)]))
        rows = []
        for name, options in comparison.configurations.items():
            changed = {option: value for option, value in options.items() if value != usual.get(option)}
            shown = ", ".join(f"{option} {format_value(value)}" for option, value in changed.items())
            rows.append(cells_of([method_name(name), shown or "as the job"]))
        grid = Grid("Options that differ from the job's.", [table.name, "options"], rows, numeric=False)
        parts.append(grid if len(rows) <= MOST_ROWS else Folded(f"All {len(rows)} configurations", [grid]))
    return parts


def _folds_in_words(folds: Folds | None) -> list[str]:
    if folds is None:
        return []
    fold = f" with its fold, one of {len(folds.folds)}" if folds.folds else ""
    return [
        f"Each of {len(folds.environments)} environments was left out once{fold}. A model learned from the others and "
        "was measured there.",
        "What was held out of training of the other environments chose the evaluation of each run and, in the column "
        f"{CHOSEN}, the method. The environment left out chose nothing.",
    ]


def _origin(experiment: str, name: str, runs: Sequence[Run]) -> Facts:
    """When, where and with what the runs were trained; ``name`` is that of their group's run in MLflow."""

    def joined(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value))

    tags = [run.record["tracking"]["tags"] for run in runs]
    origins = [run.record.get("origin", {}) for run in runs]
    facts = {
        "trainings": f"{len(runs)}, {duration(sum(run.seconds for run in runs))} in all, until "
        + _day(max(run.ended_at for run in runs)),
        "machine": joined(origin.get("machine") for origin in origins),
        "software": f"Concord {joined(each.get('concord.version') for each in tags)}, Python "
        f"{joined(each.get('python') for each in tags)}, PyTorch {joined(each.get('torch') for each in tags)}",
        "commit": joined(origin.get("commit") for origin in origins),
        "data": joined(run.record["key"].get("data") for run in runs),
        "MLflow": f"experiment {experiment}, run {name}",
    }
    return Facts({name: value for name, value in facts.items() if value})


def _limits(result: "ComparisonResult") -> list[Part]:
    """What the numbers cannot say, and what is missing."""
    lines = []
    for table in result.tables:
        if (folds := result.plan.tables[table.name].folds) is None:
            continue
        lines.append(
            f"These are {len(folds.environments)} environments. The next one may differ from all of them more than "
            "they do from each other."
        )
        known = known_of_environments(table.runs)
        few = [name for name, each in known.items() if each.get("rows", _FEW) < _FEW]
        if few:
            more = f" and {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else ""
            lines.append(f"Fewer than {_FEW} rows, so a value there is rough: {', '.join(few[:MOST_NAMED])}{more}.")
        lines.append(
            "The methods have the settings shown above and were not tuned. Their values are of these environments, "
            "which also tell which method is the best, so the best one's are a little too good."
        )
    lines += [f"Failed: {run}: {failure.splitlines()[0]}" for run, failure in result.failed.items()]
    for name, missing in result.missing.items():
        lines.append(f"{name}: {len(missing)} of {len(result.plan.runs[name])} runs are missing.")
    return [Lines(lines)] if lines else []


def _commands(result: "ComparisonResult") -> list[Part]:
    """The commands that repeat the comparison, train its best method, and use the model."""
    plan, job = result.plan, result.plan.job
    name = {"name": plan.name} if plan.name != job.name else {}
    options = {"html": REPORT, **name, "output": plan.base.run.output}
    parts: list[Part] = [
        Command("Repeat the comparison; what is there is not trained again:", plan.command),
        Command("Make this page again, without training:", job.command("report", *plan.tables, options=options)),
    ]
    if (verdict := result.verdict) is not None and (train := result.train) is not None:
        store = _runs([result])[0].record["store"]
        parts += _use(verdict.recommended, train, store, job.model_name(plan.base))
    return parts


_CHAMPION = (
    "The champion is the best version so far. A version that was scored in other environments is not compared with it: "
    "concord models promote {model} VERSION makes it the champion, and concord models lists all"
)


def _use(method: str, train: str, store: str, model: str) -> list[Part]:
    """How to train a method on all environments, and to load and serve its model."""
    uri = f"models:/{model}@{CHAMPION}"
    load = f"import mlflow\n\nmlflow.set_tracking_uri({store!r})\nmodel = mlflow.pyfunc.load_model({uri!r})"
    return [
        Command(f"Train {method_name(method)} on all environments, and register its model:", train),
        Command(f"Load it in Python. {_CHAMPION.format(model=model)}:", load),
        Command("Serve it over HTTP:", serve_command(store, uri)),
    ]
