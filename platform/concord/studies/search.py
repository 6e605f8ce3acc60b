"""The search: suggests the next point from all observations, and from nothing else.

A suggestion depends on the space, the seed, its number and the observations in their order. So a search is restored by
repeating its observations, and a study with one trial at a time is reproducible. TPE and
random search are HyperOpt's.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from concord.errors import InputError
from concord.space import Choice, Domain, Integers, Located, LogUniform, OneOf, Point, Space, Uniform, contains

_LARGEST_SEED = 2**31 - 1


class Search:
    """Suggests points of a space.

    TPE is the tree-structured Parzen estimator (Bergstra et al., 2013), random before ``startup`` observations. The
    points ``first`` come before any other.
    """

    def __init__(
        self, space: Space, kind: Literal["tpe", "random", "grid"], seed: int, first: Sequence[Point], startup: int
    ) -> None:
        import hyperopt

        self._space = space
        self._located = space.varied()
        self._kind = kind
        self._seed = seed
        self._first = list(first)
        self._startup = startup
        self._grid = [point for point in space.grid() if point not in self._first] if kind == "grid" else []
        labels = iter(self._located)
        self._domain = hyperopt.Domain(lambda _: 0.0, _as_hyperopt(space.entries, labels))
        self._observed = hyperopt.Trials()

    @property
    def size(self) -> int | None:
        """The number of points; None if infinite."""
        return len(self._first) + len(self._grid) if self._kind == "grid" else None

    def suggest(self, number: int) -> Point | None:
        """The point of this number, from 0; None when there are no more."""
        if number < len(self._first):
            return dict(self._first[number])
        if self._kind == "grid":
            place = number - len(self._first)
            return dict(self._grid[place]) if place < len(self._grid) else None
        from hyperopt import rand, tpe

        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0]) % _LARGEST_SEED
        if self._kind == "random":
            documents = rand.suggest([number], self._domain, self._observed, seed)
        else:
            self._observed.refresh()
            documents = tpe.suggest(
                [number], self._domain, self._observed, seed, n_startup_jobs=self._startup, verbose=False
            )
        return self._decoded(documents[0]["misc"]["vals"])

    def observe(self, number: int, point: Point, score: float) -> None:
        """Add a score, where larger is better, for later suggestions. Points outside of the space are ignored."""
        from hyperopt import JOB_STATE_DONE, STATUS_OK

        try:
            list(self._space.active(point))
        except InputError:
            return
        values = self._encoded(point)
        misc = {
            "tid": number,
            "cmd": ("domain_attachment", "FMinIter_Domain"),
            "workdir": None,
            "idxs": {label: [number] * len(value) for label, value in values.items()},
            "vals": values,
        }
        document = self._observed.new_trial_docs([number], [None], [{"status": STATUS_OK, "loss": -score}], [misc])[0]
        document["state"] = JOB_STATE_DONE
        self._observed.insert_trial_docs([document])

    def _decoded(self, values: dict[str, list[Any]]) -> Point:
        point: Point = {}
        for located in self._located:
            if found := values[located.label]:
                point[located.name] = _value(located, found[0])
        return point

    def _encoded(self, point: Point) -> dict[str, list[Any]]:
        values: dict[str, list[Any]] = {}
        for located in self._located:
            if not located.active(point) or located.name not in point:
                values[located.label] = []
            elif isinstance(located.domain, Choice):
                value = point[located.name]  # True and 1 are equal, but two choices
                values[located.label] = [[contains(Choice(each), value) for each in located.domain.values].index(True)]
            else:
                values[located.label] = [point[located.name]]
        return values


def _value(located: Located, found: Any) -> Any:
    domain = located.domain
    if isinstance(domain, Choice):
        return domain.values[int(found)]
    if isinstance(domain, Integers):
        return min(max(int(found), domain.low), domain.high)
    return min(max(float(found), domain.low), domain.high)


def _as_hyperopt(entries: Any, labels: Any) -> dict[str, Any]:
    """The space in HyperOpt's form, with the labels of :meth:`Space.varied`, in the same order."""
    from hyperopt import hp

    converted: dict[str, Any] = {}
    for entry in entries.values():
        if not isinstance(entry, OneOf | Domain):
            continue
        label = next(labels).label
        if isinstance(entry, OneOf):
            converted[label] = hp.choice(label, [_as_hyperopt(branch, labels) for branch in entry.branches.values()])
        elif isinstance(entry, Choice):
            converted[label] = hp.choice(label, list(range(len(entry.values))))
        elif isinstance(entry, Integers):
            # Rounded to whole numbers: without the halves, both ends would be half as likely as the rest.
            converted[label] = hp.quniform(label, entry.low - 0.5, entry.high + 0.5, 1)
        elif isinstance(entry, LogUniform):
            converted[label] = hp.loguniform(label, np.log(entry.low), np.log(entry.high))
        elif isinstance(entry, Uniform):
            converted[label] = hp.uniform(label, entry.low, entry.high)
    return converted
