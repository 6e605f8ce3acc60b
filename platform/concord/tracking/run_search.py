"""Searches the tracked runs of all jobs."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from concord.errors import InputError
from concord.options import did_you_mean
from concord.tracking.store import NEWEST, OWNER, Store, TrackedRun

# A name as MLflow accepts it: accuracy/ood/far west.
_CONDITION = re.compile(r"\s*([\w.:/ -]+?)\s*(>=|<=|!=|==|=|>|<)\s*(\S.*?)\s*")
_ANOTHER = re.compile(r"(?:\s(?:and|or|&&?)\s|&|,\s).*[<>=]")  # condition in one text
_SIGNS = {"=": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
_ID = re.compile("[0-9a-f]{32}")
_MANY = 1000  # runs in one request
_MOST_NAMED = 8  # jobs or studies in an error


@dataclass(frozen=True)
class Condition:
    """A condition on an option or a metric: ``lr=0.01``, ``ood_accuracy>0.9``."""

    name: str
    sign: str
    value: str

    @staticmethod
    def of(option: str, text: str, right: str) -> "Condition":
        """Parse the condition of an option; ``right`` says what is expected."""
        found = _CONDITION.fullmatch(text)
        if found is None or (found[2] not in ("=", "!=") and _number(found[3]) is None):
            raise InputError(f"{option} {text}: {right}")
        if _ANOTHER.search(found[3]):
            raise InputError(f"{option} {text}: is more than one condition; give each as a text of its own")
        return Condition(field_name(found[1]), found[2].replace("==", "="), found[3])

    def holds(self, known: str | float | None) -> bool:
        """Whether this value fits; None never does."""
        if known is None:
            return False
        number, wanted = _number(known), _number(self.value)
        if number is not None and wanted is not None:
            return bool(_SIGNS[self.sign](number, wanted))
        return self.sign in ("=", "!=") and bool(_SIGNS[self.sign](_values(known), _values(self.value)))

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.value}"


def field_name(given: str) -> str:
    """The name of an option or a metric, perhaps given as a flag.

    A metric of a measure such as ``top-5`` is ``ood_top-5``: with a ``_`` the name is as given. So are the names of
    environments in it.
    """
    name, *environment = given.removeprefix("--").split("/", 1)
    return "/".join([name if "_" in name else name.replace("-", "_"), *environment])


def _values(text: str | float) -> list[str]:
    """The values of an option, which may be written as ``west north``, ``west,north`` or ``["west", "north"]``."""
    return re.sub(r"""[\[\](),'"]""", " ", str(text)).split()


def _number(value: str | float) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def find_runs(
    store: Store,
    most: int,
    *,
    job: str | None = None,
    status: str | None = None,
    name: str | None = None,
    study: str | None = None,
    owner: str | None = None,
    where: Sequence[Condition] = (),
    metric: str | None = None,
    largest: bool = True,
    show: Sequence[str] = (),
    shown: Callable[[TrackedRun], TrackedRun] = lambda run: run,
) -> list[TrackedRun]:
    """The first `most` runs. Raises InputError for a job, a study, an option or a metric that no run has.

    `owner` is a user, `status` in lower case. With `study` the runs are its trials. They are ordered by `metric`,
    without the runs that lack it; without a metric the newest come first. `show` has further options and metrics, of
    which at least one run must have each. `shown` returns a run with the status that is shown: MLflow has no
    INTERRUPTED.
    """
    # A group's runs have no job, unless their models are registered; they are found by name or study.
    conditions = ["tags.`concord.job` != ''"] if study is None and name is None else ["tags.`concord.version` != ''"]
    conditions += ["tags.`concord.kind` != ''"] if study is not None else []
    conditions += [f"tags.`concord.job` = {_quoted('job', job)}"] if job else []
    conditions += [f"tags.`concord.study` = {_quoted('study', study)}"] if study else []
    # MLflow shows an interrupted run as running, or as killed.
    unclear = status in ("interrupted", "running", "killed")
    conditions += [f"attributes.status = '{status.upper()}'"] if status and status != "interrupted" else []
    conditions += [f"tags.`{OWNER}` = {_quoted('mine', owner)}"] if owner else []
    conditions += [f"attributes.run_name LIKE {_quoted('name', f'%{name}%')}"] if name else []
    order = f"metrics.`{metric}` {'DESC' if largest else 'ASC'}" if metric else NEWEST
    known: set[str] = set()
    found: list[TrackedRun] = []
    few = not where and not unclear  # all that the store finds are wanted
    for run in map(shown, store.search(" AND ".join(conditions), order, page=min(most, _MANY) if few else _MANY)):
        known |= run.metrics.keys() | run.parameters.keys()
        if status and run.status.lower() != status:
            continue
        if (metric is None or metric in run.metrics) and all(
            each.holds(run.metrics.get(each.name, run.parameters.get(each.name))) for each in where
        ):
            found.append(run)
        if len(found) == most:
            break
    if not found:
        for option, given in (("job", job), ("study", study)):
            _require_tagged(store, option, given)
    asked = [("where", each.name) for each in where] + ([("metric", metric)] if metric else [])
    none = f"none of the first {most} runs has it; --top looks at more" if len(found) == most else "no run has it"
    for option, field in [*asked, *(("show", each) for each in show)]:
        if known and field not in known:
            raise InputError(f"--{option} {field}: {none}{did_you_mean(field, known)}")
    return found


def _require_tagged(store: Store, option: str, given: str | None) -> None:
    """Refuse a job or a study (InputError) that no run has, where runs have others."""
    tag = f"concord.{option}"
    if not given or any(store.search(f"tags.`{tag}` = {_quoted(option, given)}", page=1)):
        return
    runs = zip(range(_MANY), store.search(f"tags.`{tag}` != ''"), strict=False)
    if names := sorted({run.tags[tag] for _, run in runs}):
        shown = ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
        raise InputError(f"--{option} {given}: no run is of it; there are runs of {shown}{did_you_mean(given, names)}")


def _quoted(option: str, value: str) -> str:
    if "'" in value:
        raise InputError(f"--{option} {value.strip('%')}: must be without quotation marks")
    return f"'{value}'"


def compared_run(store: Store, name: str) -> TrackedRun:
    """The run of a name or id given by ``--compare``. Raises InputError if there is none, or more than one."""
    if _ID.fullmatch(name):
        return store.run(name)
    found = list(store.search(f"attributes.run_name = {_quoted('compare', name)}"))
    if not found:
        names = [run.name for _, run in zip(range(_MANY), store.search(""), strict=False)]
        raise InputError(f"--compare {name}: there is no such run{did_you_mean(name, names)}")
    if len(found) > 1:
        ids = ", ".join(run.run_id for run in found)
        raise InputError(f"--compare {name}: {len(found)} runs have this name; give the id of one: {ids}")
    return found[0]
