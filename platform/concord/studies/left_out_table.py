"""The table of environments left out in turn: what was chosen without them, and what choosing by them would have given.

A fold is a run that leaves one environment out. Its record has that environment's value at every evaluation, beside the
value of the others' held-out examples, so both choices are made from the run's own history.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from concord.analysis.comparison_figures import Spread, left_out_figure
from concord.studies.criterion import Criterion, metric_on
from concord.studies.tables import Cells, KeptLine, ResultsTable
from concord.training import Comparison, FinishedRun, Runs
from concord.training.comparison import Folds
from concord.training.evaluation import worst

ORACLE, HELD_OUT = " (oracle)", " (held-out)"
CHOSEN, BEST = "chosen by held-out", "chosen by itself (oracle)"


def fold_values(run: FinishedRun, folds: Folds) -> dict[str, float]:
    """The left-out environment's value at the evaluation that the others' held-out examples choose, by its name.

    With ``(held-out)`` the value that chose, with ``(oracle)`` the left-out environment's own best. Ties are decided by
    the held-out loss.
    """
    name, criterion = str(run.options["leave_out"]), Criterion.of("held-out", folds.measure, folds.mode)
    own = dataclasses.replace(criterion, metric=metric_on("validation", folds.measure))
    metrics = [each.metrics for each in run.history]
    chosen = max(metrics, key=lambda each: (criterion.score(each), -each.get(criterion.loss, math.inf)))
    best = max(metrics, key=own.score)
    return {name: chosen[own.metric], name + HELD_OUT: chosen[criterion.metric], name + ORACLE: best[own.metric]}


def with_choices(lines: Iterable[KeptLine], folds: Folds, methods: int) -> list[KeptLine]:
    """A line for each method and seed, of the lines of its folds; and for each seed the choice among this many methods.

    In each fold the method is chosen as the evaluation is, by the others' held-out examples.
    """
    found: dict[tuple[str, int], KeptLine] = {}
    for line in lines:
        before = found.setdefault((line.configuration, line.seed), dataclasses.replace(line, values={}, seconds=0.0))
        values, seconds = {**before.values, **line.values}, before.seconds + line.seconds
        found[line.configuration, line.seed] = dataclasses.replace(before, values=values, seconds=seconds)

    def rank(value: float) -> float:
        """The larger the better; a value that is not finite is the worst."""
        return (value if folds.mode == "max" else -value) if math.isfinite(value) else -math.inf

    choices: list[KeptLine] = []
    for seed in dict.fromkeys(seed for _, seed in found):
        there = [line for line in found.values() if line.seed == seed]
        chosen, best = dict[str, float](), dict[str, float]()
        for name in folds.environments:
            each = [line.values for line in there if name + HELD_OUT in line.values]
            if len(each) == methods:
                chosen[name] = max(each, key=lambda values: rank(values[name + HELD_OUT]))[name]
                best[name] = max((values[name + ORACLE] for values in each), key=rank)
        for row, values in ((CHOSEN, chosen), (BEST, best)):
            choices.append(dataclasses.replace(there[0], configuration=row, values=values, seconds=0.0))
    rows = sorted([*found.values(), *choices], key=lambda line: line.configuration in (CHOSEN, BEST))
    return [dataclasses.replace(line, values={**line.values, **_summary(line.values, folds)}) for line in rows]


def _summary(values: Mapping[str, float], folds: Folds) -> dict[str, float]:
    """Mean and worst of the environments, if each has a value."""
    found: dict[str, float] = {}
    for suffix in ("", ORACLE):
        each = [values.get(name + suffix, math.nan) for name in folds.environments]
        if all(map(math.isfinite, each)):
            found[f"mean {folds.measure}{suffix}"] = statistics.fmean(each)
            found[f"worst {folds.measure}{suffix}"] = worst(each, folds.mode)
    return found


def explained(folds: Folds) -> str:
    """The meaning of the numbers, in one line."""
    return (
        f"{folds.measure} in each environment where it is left out; the others' held-out examples choose evaluation "
        "and method; (oracle): the left-out environment itself chooses"
    )


class LeftOutTable(ResultsTable):
    """A row for each environment, since they may be many, and a column for each method and choice."""

    def cells(self) -> Cells:
        """The table as text."""
        header, rows = super().cells()
        columns = [header, *rows]
        first, *others = ([column[at] for column in columns] for at in range(len(header)))
        return first, others


def left_out_table(name: str, lines: Sequence[KeptLine], title: str = "") -> LeftOutTable:
    """The table of these lines: environments, their mean and worst, and the same with the oracle's evaluations."""
    headings = list(dict.fromkeys(heading for line in lines for heading in line.values))
    environments = {heading.removesuffix(HELD_OUT) for heading in headings if heading.endswith(HELD_OUT)}
    hidden = {name + suffix for name in environments for suffix in (HELD_OUT, ORACLE)}
    columns = {heading: heading for heading in headings if heading not in hidden}
    methods: dict[str, Mapping[str, object]] = {line.configuration: {} for line in lines}
    comparison = Comparison(methods or {"none": {}}, columns=columns, title=title)
    return LeftOutTable(name, comparison, lines)


def draw_left_out(folds: Folds, runs: Runs) -> object:
    """The figure of a comparison's folds."""
    values: dict[str, Spread] = {}
    for method, each in runs.items():
        found = [fold_values(run, folds) for run in each]
        values[method] = {
            name: ([run[name] for run in found if name in run], [run[name + ORACLE] for run in found if name in run])
            for name in folds.environments
        }
    return left_out_figure(values, folds.measure)
