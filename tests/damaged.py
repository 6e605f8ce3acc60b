"""Any JSON value in place of any field of a file."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from concord.storage import json_line

# Text where a number stands, numbers beyond 64 bits and beyond floats, negative positions, nesting.
DEEP = json.loads("[" * 300 + "]" * 300)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([10**400, -(2**63), 2**63, 5e-324, math.nan, math.inf, "", ".", "..", "a/b", "\x00", DEEP])
    | st.floats(allow_subnormal=False)  # a process that trains has none
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MISSING = object()


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths to all values in a JSON value."""
    yield ()
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in entries:
        yield from ((name, *rest) for rest in places(each))


def changed(value: Any, data: st.DataObject) -> Any:
    """The value with another one, or none, at a drawn place."""
    path = data.draw(st.sampled_from([*places(value)]))
    other = data.draw(JSON | st.just(MISSING))
    if not path:
        return None if other is MISSING else other
    whole = copy.deepcopy(value)
    inner = whole
    for name in path[:-1]:
        inner = inner[name]
    if other is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = other
    return whole


def damage(file: Path, data: st.DataObject) -> None:
    """Change one value in a JSON file, or in a line of one."""
    if file.suffix == ".json":
        file.write_text(json.dumps(changed(json.loads(file.read_text()), data)))
        return
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    number = data.draw(st.integers(0, len(lines) - 1))
    lines[number] = changed(lines[number], data)
    file.write_bytes(b"".join(map(json_line, lines)))
