"""The search of a study: its space, and the points that it tries.

The space is the job's, a default, or a file's, changed by the command line. A suggestion depends on the space, the
seed, its number and the observations in their order, and on nothing else. So a search is restored by repeating its
observations, and a study with one trial at a time is reproducible. TPE and random search are HyperOpt's.
"""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin

import numpy as np

from concord.aggregation.rules_by_name import searched
from concord.errors import InputError, format_for_cli
from concord.options import (
    ALTERNATIVES,
    Role,
    did_you_mean,
    fits,
    flag_of,
    kind_of,
    option_values,
    options_of,
    require_one_way,
    with_alternatives,
)
from concord.redaction import is_secret
from concord.space import (
    Choice,
    Domain,
    Entry,
    Integers,
    LogUniform,
    OneOf,
    Point,
    Space,
    Uniform,
    Value,
    contains,
    format_point,
    frozen,
    literal,
    parse_entry,
)
from concord.studies.study_options import StudyOptions
from concord.training import RunConfig, Study, TrainConfig
from concord.training.options import ASK_FOR_A_MASK

_Varied = Domain | OneOf

Config = TypeVar("Config", bound=RunConfig)


def wide(config: TrainConfig) -> Space:  # noqa: ARG001
    """The space that the AND-mask paper's published code advises for a wide search."""
    return Space(
        {
            "lr": LogUniform(1e-4, 1.0),
            "l1": 0.0,
            "l2": LogUniform(1e-5, 1.0),
            "regularization": "decoupled",
            "aggregator": Choice("and-mask", "geometric-mean"),
            "threshold": Uniform(0.0, 1.0),
            "rescale": Choice(True, False),
            "optimizer": Choice("adam", "sgd"),
        }
    )


def derived(config: TrainConfig) -> Space:
    """A space around a configuration: learning rate, batch size, penalty, and the mask's options if it has a mask."""
    entries: dict[str, Entry] = {
        "lr": LogUniform(config.optimizer.lr / 30, config.optimizer.lr * 30),
        "batch_size": Choice(
            *sorted({max(1, config.data.batch_size // 2), config.data.batch_size, config.data.batch_size * 2})
        ),
        "penalty": OneOf(
            {
                "none": {"l1": 0.0, "l2": 0.0},
                "l1": {"l1": LogUniform(1e-6, 1e-3), "l2": 0.0},
                "l2": {"l1": 0.0, "l2": LogUniform(1e-6, 1e-2)},
            }
        ),
    }
    resolved = config.resolve()
    by_test = searched(resolved.aggregation.rule_type)
    strictness = by_test if "significance" in by_test else {"threshold": Uniform(0.0, 1.0)}
    mask_entries: dict[str, Entry] = {**strictness, "rescale": Choice(True, False)}
    unused = resolved.unused()
    return Space(entries | {name: entry for name, entry in mask_entries.items() if name not in unused})


FOR_EVERY_JOB = {"derived": derived, "wide": wide}


def chosen_study(studies: Mapping[str, Study], options: StudyOptions, base: RunConfig) -> tuple[str, Study]:
    """The method's name and its study."""
    known = dict(studies)
    if isinstance(base, TrainConfig):
        if ASK_FOR_A_MASK & {_varied_name(text) for text in options.vary}:
            base = base.with_options(threshold=0.5)  # so that the derived space is that of the rule of its points
        known |= {name: Study(space(base)) for name, space in FOR_EVERY_JOB.items() if name not in known}
    else:  # the options of a job's own loop are unknown
        known = known or {"own": Study(Space({}))}
    name = options.method or next(iter(known))
    if name not in known:
        raise InputError(f"--method {name}: there is no such method; there are {', '.join(known)}")
    return name, known[name]


def _varied_name(text: str) -> str:
    """The option of a ``--vary``."""
    return text.partition("=")[0].strip().lstrip("-").replace("-", "_")


def study_space(
    declared: Space,
    options: StudyOptions,
    given: set[str],
    base: RunConfig,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> Space:
    """The space to search: the job's or a file's, without the ``given`` options, and with those of ``--vary``.

    ``sources`` says where given options are if not on the command line.
    """
    space = Space.read(options.space) if options.space is not None else declared
    vary: dict[str, Entry] = {}
    texts: dict[str, str] = {}
    hints = {name: option.hint for name, option in options_of(type(base)).items()}
    for text in options.vary:
        name, (_, equals, domain) = _varied_name(text), text.partition("=")
        if not equals or not name or not domain:
            raise InputError(f"--vary {text}: give NAME=VALUES, such as lr=log:1e-4:1 or batch_size=64,128")
        if name in vary:
            raise InputError(f"--vary {text}: {name} is given twice")
        hint, texts[name] = hints.get(name), domain
        vary[name] = parse_entry(name, domain, get_args(hint) if get_origin(hint) is Literal else ())
    for name in given & set(vary):
        raise InputError(f"--vary {name}: contradicts {flag_of(name)}{sources.get(name, '')}, which fixes it")
    chosen = given | vary.keys()
    require_one_way({name: value for name, value in option_values(base).items() if name in given} | texts)
    space = space.without(given | (with_alternatives(chosen) - chosen)).replacing(vary)
    # A switch whose branches are empty decides nothing.
    space = space.filtered(
        lambda name, entry: not isinstance(entry, OneOf) or name in hints or any(entry.branches.values())
    )
    for name in filter(is_secret, space.names()):
        raise InputError(f"--vary {name}: is named like a secret, and varied options are recorded and shown")
    if not space.varied():
        raise InputError("the space is empty: nothing is varied; give --vary NAME=VALUES or --space FILE")
    _check_against(space, base)
    return space


def config_at(base: Config, space: Space, point: Point) -> Config:
    """The configuration of a trial."""
    known, values = options_of(type(base)), {**space.fixed(point), **point}
    return base.with_options(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True)
class OwnPoint:
    """The point of a space nearest to a job's own settings.

    Attributes:
        point: of the space.
        moved: the job's own values of options that the space does not contain.
    """

    point: Point
    moved: Mapping[str, Value]

    @staticmethod
    def read(record: Mapping[str, Any] | None) -> "OwnPoint | None":
        """The point from a study's record; None if there is none."""
        if record is None:
            return None
        return OwnPoint(*({name: frozen(value) for name, value in record[part].items()} for part in ("point", "moved")))

    def with_moved(self, values: Mapping[str, Any]) -> "OwnPoint":
        """The point, with these own values that the space does not contain."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        return OwnPoint(self.point, {**self.moved, **plain})

    def __str__(self) -> str:
        moved = f" (the nearest in the space to {format_point(self.moved)})" if self.moved else ""
        return format_point(self.point) + moved


def own_point(space: Space, base: RunConfig, num_environments: int | None = None) -> OwnPoint | None:
    """The point of a job's own settings; None if they contradict each other there.

    A number outside of its domain becomes the nearest in it, any other value the first. A switch that is not an option
    takes the branch that misses the fewest settings, the first of equals.
    """
    options = options_of(type(base))

    def within(entries: Mapping[str, Entry], so_far: OwnPoint) -> OwnPoint:
        for name, entry in entries.items():
            point, moved = so_far.point, so_far.moved
            config = config_at(base, space, point)
            in_use = _values_in_use(config, num_environments)
            if isinstance(entry, OneOf) and name not in options:
                ways = [
                    within(inner, _with_fixed(inner, in_use, OwnPoint({**point, name: branch}, moved)))
                    for branch, inner in entry.branches.items()
                ]
                so_far = min(ways, key=lambda own: len(own.moved))
            if name not in options or not isinstance(entry, _Varied):
                continue
            domain: Domain = Choice(*entry.branches) if isinstance(entry, OneOf) else entry
            wanted = option_values(config)[name]
            if not contains(domain, wanted):
                wanted = in_use[name]
            value = _nearest(domain, wanted)
            so_far = OwnPoint({**point, name: value}, moved)
            so_far = so_far if contains(domain, wanted) else so_far.with_moved({name: wanted})
            if isinstance(entry, OneOf):
                so_far = within(entry.branches[str(value)], so_far)
        return so_far

    own = within(space.entries, OwnPoint({}, {}))
    try:
        config_at(base, space, own.point).check()
    except InputError:
        return None
    return own


def _values_in_use(config: RunConfig, environments: int | None) -> dict[str, Any]:
    """The values of the options, resolved; with a number of training environments also the rule's strictness."""
    resolved = config.resolve()
    by_rule = resolved.strictness(environments) if isinstance(resolved, TrainConfig) and environments else {}
    return option_values(resolved) | by_rule


def _with_fixed(branch: Mapping[str, Entry], values: Mapping[str, Any], own: OwnPoint) -> OwnPoint:
    """The point in this branch, with the settings that it fixes to other values."""
    fixed = {name: entry for name, entry in branch.items() if not isinstance(entry, _Varied) and name in values}
    return own.with_moved({name: values[name] for name, entry in fixed.items() if values[name] != entry})


def _nearest(domain: Domain, wanted: Value) -> Value:
    """The value itself, else the nearest number of the domain, else its first value."""
    if contains(domain, wanted):
        return wanted
    number = wanted if isinstance(wanted, (int, float)) and not isinstance(wanted, bool) else None
    if isinstance(domain, Choice):
        numbers = [each for each in domain.values if isinstance(each, (int, float)) and not isinstance(each, bool)]
        if number is None or not numbers:
            return domain.values[0]
        return min(numbers, key=lambda each: abs(each - number))
    within = domain.low if number is None else min(max(number, domain.low), domain.high)
    return round(within) if isinstance(domain, Integers) else within


def first_points(space: Space, texts: Sequence[str], declared: Sequence[Mapping[str, Value]]) -> list[Point]:
    """The points to try first: the command line's, then the job's."""
    points = []
    for text in texts:
        given: dict[str, Value] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not equals:
                raise InputError(f"--suggest {text}: give NAME=VALUE,NAME=VALUE")
            name = name.strip().replace("-", "_")
            domains = [each.domain for each in space.varied(name)]
            words = [word for domain in domains if isinstance(domain, Choice) for word in domain.values]
            given[name] = literal(value.strip(), words)
        points.append(_completed(space, given, f"--suggest {text}"))
    for suggestion in declared:
        # If the command line removed or narrowed a domain, the job's suggestion is not an error.
        with contextlib.suppress(InputError):
            known = {name: value for name, value in suggestion.items() if name in space.names()}
            points.append(_completed(space, known, "suggestion"))
    return points


def _completed(space: Space, given: Mapping[str, Value], source: str) -> Point:
    """The point with these values; missing ones take the first value of their domains."""
    point: Point = {}
    for located in space.varied():
        if located.active(point):
            domain = located.domain
            first = domain.values[0] if isinstance(domain, Choice) else domain.low
            point[located.name] = value = given.get(located.name, first)
            if not contains(domain, value):
                raise InputError(f"{source}: {located.name} {value} is not in the space")
    at = space.fixed(point) | point
    for name, value in given.items():
        if name not in at or at[name] != value:
            raise InputError(f"{source}: {name} is not varied here; a point is {format_point(point)}")
    return point


def _check_against(space: Space, base: RunConfig) -> None:
    """Refuse names and values that the job's configuration does not take (InputError)."""
    options = options_of(type(base))
    hints = {name: option.hint for name, option in options.items()}
    # Check with the fixed values, which hold in every trial.
    fixed = {
        name: value
        for name, value in space.entries.items()
        if name in hints and not isinstance(value, _Varied) and fits(value, hints[name])
    }
    base = config_at(base, Space(fixed), {})
    for one, other in ALTERNATIVES:
        for first, second in itertools.product(space.varied(one), space.varied(other)):
            shared = first.conditions.keys() & second.conditions.keys()
            if all(first.conditions[switch] == second.conditions[switch] for switch in shared):
                raise InputError(f"space: {first.label} and {second.label}: one replaces the other; vary one")
    for located in space.located():
        name, entry = located.name, located.entry
        if name not in hints:
            if isinstance(entry, OneOf):
                continue  # a switch
            near = did_you_mean(name, hints) or f"; it has {', '.join(sorted(hints))}"
            raise InputError(f"space: {name}: the job has no such option{near}")
        if options[name].role not in (Role.SCIENCE, Role.LEARNING):
            scores = "how a trial is scored"
            decides = scores if options[name].role is Role.SCORING else "where and how a run works, not what it learns"
            raise InputError(f"space: {name}: decides {decides}, so it cannot be varied")
        values = _extremes(entry)
        for value in values:
            if not fits(value, hints[name]):
                raise InputError(f"space: {name} {value}: must be {kind_of(hints[name])}")
            try:
                base.with_options(**{name: value}).check()
            except InputError as error:
                raise InputError(f"space: {format_for_cli(error)}") from error


def _extremes(entry: Entry) -> list[Any]:
    if isinstance(entry, (OneOf, Choice)):
        return list(entry.branches if isinstance(entry, OneOf) else entry.values)
    return [entry.low, entry.high] if isinstance(entry, Domain) else [entry]


def least_significance(space: Space, base: TrainConfig) -> float | None:
    """The smallest ``--significance`` of any trial; None if no trial has one."""
    values = [value for each in space.varied("significance") for value in _extremes(each.entry)]
    return min((each for each in [*values, base.aggregation.significance] if each is not None), default=None)


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
                point[located.name] = _value(located.domain, found[0])
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


def _value(domain: Domain, found: Any) -> Value:
    """A value of HyperOpt's; by rounding it may lie just outside of the domain."""
    if isinstance(domain, Choice):
        return domain.values[int(found)]
    return _nearest(domain, int(found) if isinstance(domain, Integers) else float(found))


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
