"""Tracked runs of any job, found by what is known of them."""

import math
import operator
import re
from dataclasses import dataclass
from typing import Literal

from concord.errors import InputError
from concord.options import did_you_mean
from concord.tracking.store import NEWEST, Run, Store

RunStatus = Literal["running", "finished", "failed", "killed"]

_CONDITION = re.compile(r"\s*([\w.-]+?)\s*(>=|<=|!=|=|>|<)\s*(\S.*?)\s*")
_SIGNS = {"=": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
_ID = re.compile("[0-9a-f]{32}")
_MANY = 1000  # runs, to be asked for at a time


@dataclass(frozen=True)
class Condition:
    """That an option or a metric has a value, or lies above or below one: ``lr=0.01``, ``ood_accuracy>0.9``."""

    name: str
    sign: str
    value: str

    @staticmethod
    def of(text: str) -> "Condition":
        """The condition in these words.

        Raises:
            InputError: they are none.
        """
        found = _CONDITION.fullmatch(text)
        if found is None or (("<" in found[2] or ">" in found[2]) and _number(found[3]) is None):
            raise InputError(f"--where {text}: give OPTION=VALUE, or METRIC>NUMBER or METRIC<NUMBER, in quotes")
        return Condition(found[1].replace("-", "_"), found[2], found[3])

    def holds(self, run: Run) -> bool:
        """Whether it does for a run; not where the run has no such option or metric."""
        known = run.metrics.get(self.name, run.parameters.get(self.name))
        if known is None:
            return False
        there, wanted = _number(known), _number(self.value)
        if there is not None and wanted is not None:
            return bool(_SIGNS[self.sign](there, wanted))
        return self.sign in ("=", "!=") and bool(_SIGNS[self.sign](str(known), self.value))


def _number(value: str | float) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class RunSearch:
    """Which runs are wanted, and in which order.

    Attributes:
        job: only runs of this job.
        status: only those that are so.
        name: only those with this in their names.
        study: the trials of this study, in place of the runs that are none.
        where: only those for which these hold.
        metric: in the order of this metric, those that have it; None: the newest first.
        largest: whether the metric's largest value comes first.
        show: further options and metrics that are asked for.
    """

    job: str | None = None
    status: RunStatus | None = None
    name: str | None = None
    study: str | None = None
    where: tuple[Condition, ...] = ()
    metric: str | None = None
    largest: bool = True
    show: tuple[str, ...] = ()

    def find(self, store: Store, most: int) -> list[Run]:
        """The first so many of these runs.

        Raises:
            InputError: an option or a metric that none of the runs has.
        """
        order = f"metrics.`{self.metric}` {'DESC' if self.largest else 'ASC'}" if self.metric else NEWEST
        known: set[str] = set()
        found: list[Run] = []
        for run in store.search(self._condition(), order, page=_MANY if self.where else min(most, _MANY)):
            known |= run.metrics.keys() | run.parameters.keys()
            if (self.metric is None or self.metric in run.metrics) and all(each.holds(run) for each in self.where):
                found.append(run)
            if len(found) == most:
                break
        self._check_names(known)
        if self.metric is not None:  # a store does not know of branches that were left, and orders by them, too
            sign = -1 if self.largest else 1
            found.sort(key=lambda run: (math.isnan(value := run.metrics[str(self.metric)]), sign * value))
        return found

    def _condition(self) -> str:
        # Trials have no job, which their study has.
        conditions = ["tags.`concord.job` != ''"] if self.study is None else ["tags.`concord.kind` != ''"]
        conditions += [f"tags.`concord.job` = {_quoted('job', self.job)}"] if self.job else []
        conditions += [f"tags.`concord.study` = {_quoted('study', self.study)}"] if self.study else []
        conditions += [f"attributes.status = '{self.status.upper()}'"] if self.status else []
        conditions += [f"attributes.run_name LIKE {_quoted('name', f'%{self.name}%')}"] if self.name else []
        return " AND ".join(conditions)

    def _check_names(self, known: set[str]) -> None:
        """Refuse names that none of the runs has, if there are runs."""
        asked = [("where", each.name) for each in self.where]
        asked += [("metric", self.metric)] if self.metric else []
        for option, name in [*asked, *(("show", name) for name in self.show)]:
            if known and name not in known:
                raise InputError(f"--{option} {name}: no run has it{did_you_mean(name, known)}")


def _quoted(option: str, value: str) -> str:
    if "'" in value:
        raise InputError(f"--{option} {value.strip('%')}: must be without quotation marks")
    return f"'{value}'"


def named_run(store: Store, option: str, name: str) -> Run:
    """The run of this name, or id.

    Raises:
        InputError: there is none, or there are several.
    """
    if _ID.fullmatch(name):
        return store.run(name)
    found = list(store.search(f"attributes.run_name = {_quoted(option, name)}"))
    if not found:
        names = [run.name for _, run in zip(range(_MANY), store.search(""), strict=False)]
        raise InputError(f"--{option} {name}: there is no such run{did_you_mean(name, names)}")
    if len(found) > 1:
        ids = ", ".join(run.run_id for run in found)
        raise InputError(f"--{option} {name}: {len(found)} runs have this name; give the id of one: {ids}")
    return found[0]
