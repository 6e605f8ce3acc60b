"""The columns of a table as JSON, as cells of a table, and the lines that name those that break."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from concord.analysis.columns.relations import Columns, Numbers, Term, Votes

if TYPE_CHECKING:
    from concord.analysis.columns.use import Use

MOST_NAMED = 3  # columns that break; environments in a cell or a line


class _Relation(TypedDict):
    term: str
    target: str
    relation: dict[str, float]
    votes: dict[str, int]
    agree: int
    of: int
    chance: float


class _Use(TypedDict):
    shuffled: dict[str, float]
    helps: dict[str, int]
    gradient: dict[str, float]


class ColumnReport(_Relation):
    """A column as JSON: its shown term's relation by environment, the other terms', and what the model makes of it."""

    column: str
    terms: list[_Relation]
    turns: float
    fades: float
    missing: dict[str, float]
    drift: dict[str, float]
    use: _Use | None


def as_json(columns: Columns, use: "Use | None" = None) -> list[ColumnReport]:
    """All columns; an environment without a number is left out."""
    return [_column(name, columns, use) for name in columns.terms]


def _column(name: str, columns: Columns, use: "Use | None") -> ColumnReport:
    environments, shown = columns.environments, columns.shown.get(name)
    turns, fades = (0.0, 0.0) if shown is None else columns.breaks(shown)
    nothing: _Relation = {"term": name, "target": "", "relation": {}, "votes": {}, "agree": 0, "of": 0, "chance": 1.0}
    return {
        "column": name,
        **(nothing if shown is None else _relation(shown, environments)),
        "turns": max(turns, 0.0),
        "fades": max(fades, 0.0),
        "missing": _by_name(columns.missing[name], environments),
        "drift": _by_name(columns.drift[name], environments),
        "terms": [_relation(term, environments) for term in columns.terms[name] if term is not shown],
        "use": None if use is None else _use(name, use, environments),
    }


def _use(name: str, use: "Use", environments: Sequence[str]) -> _Use:
    return {
        "shuffled": _by_name(use.shuffled[name], environments),
        "helps": _signs(use.helps[name], environments),
        "gradient": _by_name(use.gradient[name], environments) if name in use.gradient else {},
    }


def _relation(term: Term, environments: Sequence[str]) -> _Relation:
    counted = term.votes
    return {
        "term": term.label,
        "target": term.target,
        "relation": _by_name(term.values, environments),
        "votes": _signs(term.signs, environments),
        "agree": counted.agree,
        "of": counted.of,
        "chance": counted.chance,
    }


def _signs(values: NDArray[Any], environments: Sequence[str]) -> dict[str, int]:
    return {name: int(sign) for name, sign in zip(environments, values, strict=True) if sign}


def _by_name(values: Numbers, environments: Sequence[str]) -> dict[str, float]:
    return {name: float(value) for name, value in zip(environments, values, strict=True) if not np.isnan(value)}


def relation_cells(column: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a column's relation, by heading."""
    constant = "constant, or few rows" if not column["relation"] else ""
    drift = max(column["drift"].items(), key=lambda item: item[1])
    return {
        "column": column["term"],
        "with the target": constant or _range(column["relation"].values()),
        "agree": f"{column['agree']} of {column['of']}" if column["of"] else "–",
        "by chance": f"{column['chance']:.2g}" if column["of"] else "–",
        "drift": f"{drift[1]:.2f} {drift[0]}" if drift[1] else "–",
        "missing": _some({name: _percent(part) for name, part in _largest_first(column["missing"]) if part > 0}) or "–",
    }


def use_cells(column: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a model's use of a column, by heading."""
    use = column["use"]
    signs = [*use["helps"].values()]
    return {
        "column": column["column"],
        "loss if shuffled": _range(use["shuffled"].values()),
        "helps": f"{sum(sign > 0 for sign in signs)} of {len(signs)}" if signs else "–",
        "gradient": _range(use["gradient"].values()) if use["gradient"] else "–",
    }


def broken_lines(columns: Sequence[Mapping[str, Any]], purposes: Mapping[str, str]) -> Iterator[str]:
    """A line for each of the columns that break most, or one that none does.

    ``turns`` and ``fades`` order them as :attr:`Columns.broken`.
    """
    broken = [each for each in columns if each["turns"] > 0 or each["fades"] > 0]
    broken.sort(key=lambda each: (each["turns"], each["fades"]), reverse=True)
    if not broken:
        yield "columns that break by more than chance: none"
    for each in broken[:MOST_NAMED]:
        yield _broken_line(each, purposes)
    if len(broken) > MOST_NAMED:
        yield f"others that break: {', '.join(each['term'] for each in broken[MOST_NAMED:])}"


def against(column: Mapping[str, Any]) -> list[str]:
    """The environments where the column's relation has the sign that is not the usual one, the strongest first."""
    values, votes, usual = column["relation"], column["votes"], _usual_sign(column)
    return [name for name in sorted(values, key=lambda name: usual * values[name]) if votes.get(name) == -usual]


def _usual_sign(column: Mapping[str, Any]) -> int:
    values, votes = column["relation"], column["votes"]
    return Votes.count(np.array([*votes.values()])).sign or int(np.sign(max(values.values(), key=abs)))


def _broken_line(column: Mapping[str, Any], purposes: Mapping[str, str]) -> str:
    """Where a relation turns round or fades, where it does not, and whether the model is misled there."""
    values, usual = column["relation"], _usual_sign(column)
    ordered = sorted(values, key=lambda name: usual * values[name])
    turned = against(column)
    strange = turned or ordered[:1]
    others = [values[name] for name in ordered if name not in strange]
    several = len(set(purposes.values())) > 1
    places = _some({f"{name} ({purposes[name]})" if several else name: f"{values[name]:+.2f}" for name in strange})
    what = "turns round" if column["turns"] > 0 else "fades, and may turn round" if turned else "fades"
    line = f"{column['term']} {what}: {places}; {_range(others)} in the others"
    if not turned:
        line += f", most in {ordered[-1]}"
    if column["target"]:
        line += f" (with class {column['target']})"
    use = column["use"]
    if misled := [name for name in strange if use and use["helps"].get(name) == -1]:
        found = {name: f"{use['shuffled'][name]:+.2g}" for name in misled}
        line += f"; it misleads the model, whose loss falls when it is shuffled: {_some(found)}"
    return f"breaks: {line}"


def _range(values: Iterable[float]) -> str:
    """The numbers from the least to the largest, ``-0.41 to +0.30``."""
    least, *_, most = 2 * [f"{each:+.2f}" for each in sorted(values)]
    return least if least == most else f"{least} to {most}"


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.005 else "<1%"


def _largest_first(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])


def _some(found: Mapping[str, str]) -> str:
    """Names with their values: all of four, or the first three and the number of others."""
    named = [f"{name} {value}" for name, value in found.items()]
    more = len(named) - MOST_NAMED
    return ", ".join(named) if more <= 1 else f"{', '.join(named[:MOST_NAMED])} and {more} more"
