"""What to know of a table's columns before training: what is ignored, odd cells, and levels that may be misspelt."""

import difflib
import re
from collections.abc import Collection, Iterator

import numpy as np
import pandas as pd

from concord.environments.table_encoder import RARE, as_texts
from concord.environments.table_rows import Table, may_name_rows

_MOST_RARE = 0.02  # of the rows of the level that a misspelt one resembles
_SHORTEST_WORD = 4  # in which one letter may be wrong
_LEAST_VALUES = 20  # of a column whose numbers measure or count something
_MOST_LEVELS = 1000
_MOST_NAMED = 5  # levels or environments of a column
_SEPARATORS = re.compile(r"(?<=[^\W\d])[\s_.-]+(?=[^\W\d])")  # between letters


def notes(table: Table, left_out: Collection[str], quote: bool = True) -> Iterator[str]:
    """A line for each thing to know.

    Args:
        table: the table.
        left_out: the columns that the user ignores.
        quote: whether a line may quote a cell of text, which may be about a person.
    """
    for name in table.frame.columns:
        if name == table.weight:
            yield f"column {name} is the weight of the rows, which is no input; what is shown here counts rows alike"
        elif name == table.cluster:
            clusters = table.frame[name].nunique()
            yield f"column {name} names {clusters} units of {len(table.frame)} rows, and is no input"
        elif name in table.text:
            yield f"column {name}: text, of which an encoder makes inputs"
        elif name not in table.kinds and name != table.target:
            yield f"column {name} is ignored: {_why_ignored(table, name, left_out, quote)}"
    for name, kind in table.kinds.items():
        column = table.frame[name]
        if kind == "numeric":
            yield from _odd_numbers(name, column, table.environment)
        elif kind == "date":
            yield f"column {name}: dates become the inputs year, month, day, weekday and hour"
        elif kind == "category":
            yield from _misspelt(f"column {name}", column)
    yield from _misspelt("environments", table.environment)
    if table.classes is not None:
        yield from _misspelt(f"target {table.target}", table.frame[table.target])


def _why_ignored(table: Table, name: str, left_out: Collection[str], quote: bool) -> str:
    known = table.rows(table.by_purpose["train"])[name].dropna()
    if name in left_out:
        return "as --columns says"
    if known.empty:
        return "it has no value in the training environments"
    if pd.api.types.is_numeric_dtype(known):
        return "it has no name, so it counts the rows"
    found = f"text with {known.nunique()} different values in {len(known)} training rows"
    found += f", such as {known.iloc[0]!r:.40}" if quote else ""
    words = known.astype("string").str.contains(r"\s").mean() > 0.5
    return f"{found}; --text {name} makes inputs of it" if words else found


def _odd_numbers(name: str, column: pd.Series, environment: pd.Series) -> Iterator[str]:
    numbers = pd.to_numeric(column).astype("float64")
    finite = numbers[np.isfinite(numbers)]
    if infinite := int(np.isinf(numbers).sum()):
        yield f"column {name}: {infinite} infinite values count as missing"
    values, counts = np.unique(finite, return_counts=True)
    if len(values) <= _LEAST_VALUES:
        return
    if note := may_name_rows(name, column):
        yield note
    for place, gap in ((0, values[1] - values[0]), (-1, values[-1] - values[-2])):
        others = finite[finite != values[place]]
        if counts[place] >= RARE and gap > others.quantile(0.75) - others.quantile(0.25):
            parts = finite.eq(values[place]).groupby(environment[finite.index]).mean().sort_values(ascending=False)
            where = ", ".join(f"{where} {part:.0%}" for where, part in parts.head(_MOST_NAMED).items() if part > 0)
            found = f"{counts[place]} cells are {values[place]:g}, far from all others ({where})"
            yield f"column {name}: {found}; if it means missing, empty these cells"


def _misspelt(where: str, column: pd.Series) -> Iterator[str]:
    """Levels that differ in case and separators alone, and rare ones with one wrong letter."""
    counts: dict[str, int] = as_texts(column).value_counts().to_dict()
    if len(counts) > _MOST_LEVELS:
        return
    plain: dict[str, str] = {}
    found = []
    for level, count in counts.items():
        usual = plain.setdefault(_SEPARATORS.sub(" ", level.casefold()), level)
        if usual == level and count < RARE:
            frequent = (other for other, rows in counts.items() if count <= _MOST_RARE * rows)
            usual = next((other for other in frequent if _one_letter_apart(level, other)), level)
        if usual != level:
            found.append(f"{level!r} ({count}×) looks like {usual!r} ({counts[usual]}×)")
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        yield f"{where}: {', '.join(found[:_MOST_NAMED])}{more}"


def _one_letter_apart(level: str, other: str) -> bool:
    """Whether one letter is missing, added, wrong, or swapped with the next, in a long word and not at its start."""
    words, others = level.casefold().split(), other.casefold().split()
    if len(words) != len(others):
        return False
    differing = [(word, usual) for word, usual in zip(words, others, strict=True) if word != usual]
    if len(differing) != 1:
        return False
    ((word, usual),) = differing
    if min(len(word), len(usual)) < _SHORTEST_WORD or word[0] != usual[0] or not (word + usual).isalpha():
        return False
    changes = [each for each in difflib.SequenceMatcher(None, word, usual).get_opcodes() if each[0] != "equal"]
    wrong = sum(max(end - start, last - first) for _, start, end, first, last in changes)
    swapped = sorted(word) == sorted(usual) and sum(map(str.__ne__, word, usual)) == 2
    return wrong == 1 or swapped
