"""The sections of a page about the data: which columns hold, and what the rows are."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from concord.analysis.columns.notes import notes
from concord.analysis.columns.report import ColumnReport, against, as_json, broken_lines, relation_cells
from concord.analysis.figures import png
from concord.errors import InputError, format_for_cli
from concord.execution.lifecycle import Info
from concord.execution.preflight import as_input_error
from concord.options import option_values
from concord.record import Run
from concord.studies.page import MOST_NAMED, MOST_ROWS, Facts, Folded, Grid, Lines, Part, Picture, cells_of
from concord.training.job import JobFile
from concord.training.options import RunConfig

if TYPE_CHECKING:
    from concord.analysis.columns.relations import Columns
    from concord.environments.table_rows import Table  # with pandas


@dataclass(frozen=True)
class Rows:
    """The table on which runs were trained; else why it is not shown, if there was one."""

    table: "Table | None" = None
    missing: str = ""

    @functools.cached_property
    def columns(self) -> list[ColumnReport]:
        """The columns with their relations to the target, those that break first."""
        return sorted(as_json(self.relations), key=lambda each: (each["turns"], each["fades"]), reverse=True)

    @functools.cached_property
    def relations(self) -> "Columns":
        """The same as arrays."""
        from concord.analysis.columns.relations import relations  # with scipy's statistics, half a second

        assert self.table is not None
        return relations(self.table)

    def turned_in(self, environments: Sequence[str]) -> list[str]:
        """The columns that say the opposite in these environments, in words."""
        if self.table is None or not environments:
            return []
        turned = {each["term"]: against(each) for each in self.columns if each["turns"] > 0}
        found = [(name, [column for column, places in turned.items() if name in places]) for name in environments]
        return [
            f"In {name}, where it fails, {', '.join(columns[:MOST_NAMED])} "
            f"{'mean' if len(columns) > 1 else 'means'} the opposite of elsewhere"
            for name, columns in found
            if columns
        ]


def rows_of(job: JobFile, base: RunConfig, runs: Sequence[Run], info: Info) -> Rows:
    """The rows of the job's table, if it is one and has not changed since the runs."""
    if job.job.loop is not None:
        return Rows()
    # As a run recorded it: the option may be relative to another folder.
    data = {"data": Path(runs[0].options["data"])} if runs[0].options.get("data") else {}
    from concord.environments.table import TableEnvironments  # with pandas, which takes a third of a second

    try:
        with as_input_error(job, "its environments cannot be made"):
            environments = job.job.environments(base.with_options(**data).resolve())
    except InputError as error:
        missing = f"The data could not be read for this page: {format_for_cli(error)}"
        info(missing)
        return Rows(missing=missing)
    if not isinstance(environments, TableEnvironments):
        return Rows()
    if environments.version not in {run.record["key"].get("data") for run in runs}:
        missing = "The data have changed since the trainings, so this page does not show them."
        info(missing)
        return Rows(missing=missing)
    return Rows(environments.table)


def columns_parts(rows: Rows) -> list[Part]:
    """The relation of each column with the target by environment, those that break first, and the picture."""
    if (data := rows.table) is None or not (columns := rows.columns):
        return []
    from concord.analysis.columns.figures import columns_figure

    found = rows.relations
    purposes = dict(zip(found.environments, found.purposes, strict=True))
    lines = []
    for each in columns:
        named, *others = relation_cells(each).values()
        lines.append(cells_of([named, data.kinds[each["column"]], *others]))
    named, *headings = relation_cells(columns[0])
    caption = (
        f"With the target: the rank correlation with {data.target}, from the least to the largest of the environments. "
        "Agree: environments with the same sign, of those where it is no noise. By chance: the probability that random "
        "signs agree so. Drift: the largest distance of an environment's distribution from that of all rows."
    )
    every = Grid(caption, [named, "kind", *headings], lines, numeric=False)
    shown = dataclasses.replace(every, rows=lines[:MOST_ROWS])
    broken = [line.removeprefix("breaks: ") for line in broken_lines(columns, purposes)]
    absent = {each["term"]: [name for name, part in each["missing"].items() if part == 1.0] for each in columns}
    broken += [f"{term} is not there in {', '.join(names)}" for term, names in absent.items() if names]
    title = f"Each column's relation with {data.target}, by environment"
    picture = png(columns_figure(columns, purposes, data.target))
    more = [Folded(f"All {len(lines)} columns", [every])] if len(lines) > MOST_ROWS else []
    first = Lines([f"A column holds if it says the same of {data.target} everywhere.", *broken])
    return [first, Picture(picture, f"{title}: those that break first."), shown, *more]


def data_parts(base: RunConfig, rows: Rows, runs: Sequence[Run]) -> list[Part]:
    """What the rows are, and what to know of them; without a table the environments as a run recorded them."""
    values = option_values(base)
    source = {} if values.get("data") is None else {"source": values["data"].name}  # the folder is of one machine
    if (data := rows.table) is None:
        parts: list[Part] = [Lines([rows.missing])] if rows.missing else []
        return [*parts, *([Facts(source)] if source else []), *_recorded_data(runs)]
    counts = data.environment.value_counts()
    purposes = ", ".join(f"{len(names)} for {purpose}" for purpose, names in data.by_purpose.items() if names)
    target = data.frame[data.target]
    if data.classes is None:
        about = f"a number, {target.min():.4g} to {target.max():.4g}, mean {target.mean():.4g}"
    else:
        shares = target.value_counts(normalize=True)
        about = ", ".join(f"{each} {shares.get(each, 0.0):.1%}" for each in data.classes[:MOST_NAMED])
    cells = data.frame[list(data.kinds)]
    facts = source | {
        "rows": f"{len(data.frame):,}"
        + (f"; {data.without_target:,} more without a target are left out" if data.without_target else ""),
        "environments": f"{len(counts)} by {data.environment.name} ({purposes}), with {counts.min():,} to "
        f"{counts.max():,} rows",
        "target": f"{data.target}: {about}",
        "inputs": f"{len(data.kinds)} columns, {cells.isna().to_numpy().mean():.1%} of the cells missing",
    }
    left_out = [each.removesuffix("=ignore") for each in values.get("columns", ()) if each.endswith("=ignore")]
    return [Facts(facts), Lines([*notes(data, left_out, quote=False)])]


def _recorded_data(runs: Sequence[Run]) -> list[Part]:
    """The environments of the first run, as it recorded them."""
    rows = [cells_of([part["name"], part["purpose"], f"{part['examples']:,}"]) for part in runs[0].data]
    grid = Grid("The parts of the data of one run.", ["environment", "used for", "examples"], rows, numeric=False)
    if len(rows) > MOST_ROWS:
        return [Folded(f"All {len(rows)} parts of the data", [grid])]
    return [grid] if rows else []
