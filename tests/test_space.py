"""Search spaces: their points, the equality of all forms of a space, and the refusal of invalid spaces."""

import itertools
import json
import math
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concord.errors import InputError
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
    contains,
    describe,
    format_point,
    parse_entry,
)

claim = settings(max_examples=25, deadline=None)

PENALTIES = OneOf(
    {
        "none": {"l1": 0.0, "l2": 0.0},
        "l1": {"l1": Choice(1e-6, 1e-5), "l2": 0.0},
        "l2": {"l1": 0.0, "l2": Choice(1e-5, 1e-4, 1e-3)},
    }
)
EXAMPLE = Space({"lr": LogUniform(1e-4, 1.0), "batch_size": Choice(64, 128), "dropout": 0.5, "regularizer": PENALTIES})

# Any space

numbers = st.floats(-1e6, 1e6, allow_subnormal=False)
plain = st.none() | st.booleans() | st.integers(-5, 5) | numbers | st.text(string.ascii_letters, max_size=3)
values = plain | st.tuples(numbers) | st.tuples(numbers, st.tuples(numbers, numbers))
choices = st.lists(values, min_size=1, max_size=4, unique_by=lambda value: (isinstance(value, bool), value)).map(
    lambda some: Choice(*some)
)
integers = st.tuples(st.integers(-50, 50), st.integers(1, 4)).map(lambda pair: Integers(pair[0], sum(pair)))


uniform = st.tuples(st.floats(-1e3, 1e3), st.floats(0.01, 1e3)).map(lambda pair: Uniform(pair[0], sum(pair)))
log_uniform = st.tuples(st.floats(1e-9, 1e3), st.floats(1.1, 1e6)).map(
    lambda pair: LogUniform(pair[0], math.prod(pair))
)
continuous = uniform | log_uniform


@st.composite
def entries(draw: st.DrawFn, names: tuple[str, ...], leaves: st.SearchStrategy[Any], depth: int) -> dict[str, Entry]:
    """Entries under some of these names. The entries of a switch have names that begin with the switch's name."""
    found: dict[str, Entry] = {}
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=3)):
        if depth and draw(st.booleans()):
            branches = draw(st.lists(st.sampled_from(["none", "l1", "1", "true", "é"]), min_size=1, unique=True))
            inner = tuple(name + letter for letter in "pqr")
            found[name] = OneOf({branch: draw(entries(inner, leaves, depth - 1)) for branch in branches})
        else:
            found[name] = draw(leaves)
    return found


def spaces(leaves: st.SearchStrategy[Any] = choices | integers | continuous | values) -> st.SearchStrategy[Space]:
    """Spaces with nested switches."""
    return entries(tuple("abcd"), leaves, 2).map(Space)


def in_domain(domain: Domain) -> st.SearchStrategy[Any]:
    if isinstance(domain, Choice):
        return st.sampled_from(domain.values)
    return (st.integers if isinstance(domain, Integers) else st.floats)(domain.low, domain.high)


@st.composite
def points(draw: st.DrawFn, space: Space) -> Point:
    """Points, built branch by branch from the entries."""

    def chosen(entries: Mapping[str, Entry]) -> Point:
        point: Point = {}
        for name, entry in entries.items():
            if isinstance(entry, OneOf):
                point[name] = draw(st.sampled_from(sorted(entry.branches)))
                point |= chosen(entry.branches[str(point[name])])
            elif isinstance(entry, Domain):
                point[name] = draw(in_domain(entry))
        return point

    return chosen(space.entries)


@claim
@given(spaces())
def test_a_space_comes_back_from_json(space: Space) -> None:
    again = Space.from_json(json.loads(json.dumps(space.as_json())))
    assert again == space
    assert again.varied() == space.varied()
    assert again.as_json() == space.as_json()


@claim
@given(st.data())
def test_a_point_has_what_counts_in_its_branches_and_nothing_else(data: st.DataObject) -> None:
    space = data.draw(spaces())
    point = data.draw(points(space))
    assert [located.name for located in space.active(point)] == list(point)
    assert set(point) | set(space.fixed(point)) <= space.names()
    assert not set(point) & set(space.fixed(point))
    list(space.active(point | space.fixed(point)))  # a point may contain the fixed values
    for name in point:
        without = {other: value for other, value in point.items() if other != name}
        with pytest.raises(InputError, match=f"^{name}: is missing"):
            list(space.active(without))
    with pytest.raises(InputError, match=r"^elsewhere 1: is not in the space"):
        list(space.active({**point, "elsewhere": 1}))


@claim
@given(st.data())
def test_labels_are_unique_and_a_switch_comes_before_what_hangs_on_it(data: st.DataObject) -> None:
    varied = data.draw(spaces()).varied()
    assert len({located.label for located in varied}) == len(varied)
    for index, located in enumerate(varied):
        for switch, branch in located.conditions.items():
            before = [other.domain for other in varied[:index] if other.name == switch]
            assert any(contains(domain, branch) for domain in before)


def count(entries: Mapping[str, Entry]) -> int:
    """The number of points, by arithmetic."""
    return math.prod(
        sum(map(count, entry.branches.values()))
        if isinstance(entry, OneOf)
        else len(entry.values)
        if isinstance(entry, Choice)
        else entry.high - entry.low + 1
        if isinstance(entry, Integers)
        else 1
        for entry in entries.values()
    )


@claim
@given(spaces(choices | integers | values).filter(lambda space: count(space.entries) <= 500))
def test_the_grid_has_every_point_once(space: Space) -> None:
    grid = space.grid()
    assert len(grid) == count(space.entries)
    assert len({repr(sorted(point.items())) for point in grid}) == len(grid)
    for point in grid:
        list(space.active(point))


@claim
@given(st.data())
def test_what_is_taken_out_of_a_space_is_in_no_branch_of_it(data: st.DataObject) -> None:
    space = data.draw(spaces())
    names = data.draw(st.sets(st.sampled_from(sorted(space.names()) or ["a"])))
    less = space.without(names)
    assert not less.names() & names
    assert {located.label for located in less.varied()} <= {located.label for located in space.varied()}
    fixed = space.replacing(dict.fromkeys(names, 7))
    assert fixed.varied() == less.varied()
    assert fixed.fixed({}) == {**less.fixed({}), **dict.fromkeys(names, 7)}


# Known answers


def test_a_value_alone_is_fixed_and_not_named_as_varied() -> None:
    space = Space({"lr": 5, "size": Choice(1, 2), "penalty": OneOf({"none": {}, "l2": {"l2": Uniform(0.0, 1.0)}})})
    assert space.varied_entries() == ["size", "penalty"]


def test_points_of_the_example() -> None:
    labels = ["lr", "batch_size", "regularizer", "regularizer=l1/l1", "regularizer=l2/l2"]
    assert [located.label for located in EXAMPLE.varied()] == labels
    assert [located.name for located in EXAMPLE.varied()] == ["lr", "batch_size", "regularizer", "l1", "l2"]
    assert [dict(located.conditions) for located in EXAMPLE.varied()][2:] == [
        {},
        {"regularizer": "l1"},
        {"regularizer": "l2"},
    ]
    assert EXAMPLE.names() == {"lr", "batch_size", "dropout", "regularizer", "l1", "l2"}
    point: Point = {"lr": 0.01, "batch_size": 64, "regularizer": "l1", "l1": 1e-5}
    assert [located.label for located in EXAMPLE.active(point)] == labels[:4]
    assert EXAMPLE.fixed(point) == {"dropout": 0.5, "l2": 0.0}
    assert EXAMPLE.fixed({"regularizer": "none"}) == {"dropout": 0.5, "l1": 0.0, "l2": 0.0}
    assert format_point(point) == "lr 0.01, batch_size 64, regularizer l1, l1 1e-05"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 2.0}, "lr 2.0: is not in the space, which has a number from 0.0001 to 1"),
        ({"batch_size": 100}, "batch_size 100: is not in the space, which has one of 64, 128"),
        ({"regularizer": "l3"}, "regularizer l3: is not in the space, which has one of none, l1, l2"),
        ({"regularizer": "l2"}, "l2: is missing; the point is lr 0.01, batch_size 64, regularizer l2, l1 1e-05"),
        ({"regularizer": "none"}, "l1 1e-05: it is fixed to 0.0"),
        ({"l2": 1e-5}, "l2 1e-05: it is fixed to 0.0"),
        ({"dropout": 0.0}, "dropout 0.0: it is fixed to 0.5"),
        ({"epochs": 3}, "epochs 3: is not in the space at this point"),
    ],
)
def test_what_is_no_point_is_refused(change: Point, message: str) -> None:
    point: Point = {"lr": 0.01, "batch_size": 64, "regularizer": "l1", "l1": 1e-5}
    with pytest.raises(InputError) as refused:
        list(EXAMPLE.active({**point, **change}))
    assert str(refused.value) == message


def test_grid_of_the_example_without_its_learning_rate() -> None:
    branches: list[Point] = [
        {"regularizer": "none"},
        *({"regularizer": "l1", "l1": l1} for l1 in (1e-6, 1e-5)),
        *({"regularizer": "l2", "l2": l2} for l2 in (1e-5, 1e-4, 1e-3)),
    ]
    expected = [{"batch_size": size, **branch} for size, branch in itertools.product((64, 128), branches)]
    assert EXAMPLE.without({"lr"}).grid() == expected
    assert Space({"n": Integers(-1, 2)}).grid() == [{"n": -1}, {"n": 0}, {"n": 1}, {"n": 2}]
    assert Space({"lr": 0.1}).grid() == [{}]


@pytest.mark.parametrize("space", [EXAMPLE, Space({"s": OneOf({"a": {}, "b": {"lr": Uniform(0, 1)}})})])
def test_there_is_no_grid_over_a_continuous_domain(space: Space) -> None:
    with pytest.raises(InputError, match=r"--search grid: lr is a number from .*; list its values, as in --vary lr="):
        space.grid()


def test_the_same_name_may_be_in_several_branches() -> None:
    space = Space({"s": OneOf({"a": {"x": Uniform(0, 1)}, "b": {"x": Choice(5)}, "c": {"x": OneOf({"y": {}})}})})
    assert [located.label for located in space.varied()] == ["s", "s=a/x", "s=b/x", "s=c/x"]
    for point in ({"s": "a", "x": 0.5}, {"s": "b", "x": 5}, {"s": "c", "x": "y"}):
        assert len(list(space.active(point))) == 2
    with pytest.raises(InputError, match=r"^x 0\.5: is not in the space, which has one of 5$"):
        list(space.active({"s": "b", "x": 0.5}))


CONTRADICTIONS: list[tuple[Any, str]] = [
    ({"a": Choice()}, "space: a: a choice needs at least one value"),
    ({"a": Choice(1, 2, 1)}, "space: a: one of 1, 2, 1: a value appears twice"),
    ({"a": Choice(1, 1.0)}, "space: a: one of 1, 1.0: a value appears twice"),
    ({"a": OneOf({})}, "space: a: one-of needs at least one branch"),
    ({"a": Uniform(1, 1)}, "space: a: from 1 to 1: must be finite, the first smaller"),
    ({"a": LogUniform(1, 0.1)}, "space: a: from 1 to 0.1: must be finite, the first smaller"),
    ({"a": Integers(4, 3)}, "space: a: from 4 to 3: must be finite, the first smaller"),
    ({"a": Uniform(0, math.inf)}, "space: a: from 0 to inf: must be finite, the first smaller"),
    ({"a": Uniform(math.nan, 1)}, "space: a: from nan to 1: must be finite, the first smaller"),
    ({"a": LogUniform(0, 1)}, "space: a: log-uniform from 0: must be above 0"),
    ({"a": LogUniform(-1, 1)}, "space: a: log-uniform from -1: must be above 0"),
    ({"s": OneOf({"x": {"a": Choice()}})}, "space: a: a choice needs at least one value"),
    ({"a": 1, "s": OneOf({"x": {"a": 2}})}, "space: a appears twice, outside and inside a branch"),
    ({"s": OneOf({"x": {"a": 2}}), "a": 1}, "space: a appears twice, outside and inside a branch"),
    ({"s": OneOf({"x": {"s": 2}})}, "space: s appears twice, outside and inside a branch"),
    ({"a": 1, "s": OneOf({"x": {"t": OneOf({"y": {"a": 2}})}})}, "space: a appears twice, outside and inside"),
    ({"s": OneOf({"x": {"a": 1, "t": OneOf({"y": {"a": 2}})}})}, "space: a appears twice, outside and inside"),
    ({"s": OneOf({"x": {"t": OneOf({"y": {"s": 2}})}})}, "space: s appears twice, outside and inside a branch"),
    (
        {"s": OneOf({"x": {"a": 1}}), "t": OneOf({"y": {"a": 2}})},
        "space: a appears twice, in the branches of s and of t",
    ),
]


@pytest.mark.parametrize(("contradiction", "message"), CONTRADICTIONS)
def test_a_space_that_contradicts_itself_is_refused(contradiction: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        Space(contradiction)
    assert str(refused.value).startswith(message)


# Domains


@pytest.mark.parametrize(
    ("domain", "inside", "outside"),
    [
        (Uniform(0, 1), [0, 1, 0.5, 1e-300], [-1e-12, 1 + 1e-12, True, None, "0.5", math.nan]),
        (LogUniform(1e-6, 1e6), [1e-6, 1, 1e6], [0, -1e-6, 1e-7, 1e6 + 1, math.inf]),
        (Integers(1, 10**10), [1, 2.0, 10**10], [0, -1, 1.5, True, math.nan, math.inf, -math.inf]),
        (Choice(0, 0.5, "a", None), [0, 0.0, 0.5, "a", None], [False, "0", 0.25, "none"]),
        (Choice(True, False), [True, False], [1, 0, "true"]),
        (Choice(True, 1), [True, 1, 1.0], [False, 0]),
        (Choice([0.5, [1, 2]], ()), [(0.5, (1, 2)), ()], [(0.5,), 0.5]),
    ],
)
def test_what_is_in_a_domain(domain: Domain, inside: list[Any], outside: list[Any]) -> None:
    assert all(contains(domain, value) for value in inside)
    assert not any(contains(domain, value) for value in outside)


def test_domains_in_words() -> None:
    assert describe(Choice("adam", 1, None)) == "one of adam, 1, None"
    assert describe(LogUniform(1e-4, 1)) == "a number from 0.0001 to 1"
    assert describe(Integers(2, 8)) == "a whole number from 2 to 8"


# The command line's form


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("1e-4", 1e-4),
        ("3", 3),
        ("-3", -3),
        ("true", True),
        ("False", False),
        ("none", None),
        ("adam", "adam"),
        ("64,128", Choice(64, 128)),
        ("adam, sgd", Choice("adam", "sgd")),
        ("0,1e-5,1e-4", Choice(0, 1e-5, 1e-4)),
        ("true,false", Choice(True, False)),
        ("uniform:0:1", Uniform(0.0, 1.0)),
        ("log:1e-4:1", LogUniform(1e-4, 1.0)),
        ("log-uniform:1e-4:1", LogUniform(1e-4, 1.0)),
        ("int:-2:5", Integers(-2, 5)),
        ("int:1:1e3", Integers(1, 1000)),
        ("ema:0.9", "ema:0.9"),
        ("ema:0.9,swa:0.5", Choice("ema:0.9", "swa:0.5")),
        ("none,ema:0.9", Choice(None, "ema:0.9")),
        ("s3://a:1/b", "s3://a:1/b"),
        ("uniform,log", Choice("uniform", "log")),
    ],
)
def test_an_entry_is_read_from_the_command_line(text: str, entry: Entry) -> None:
    found = parse_entry("x", text)
    assert found == entry
    assert type(found) is type(entry)


def test_words_of_the_option_stay_words() -> None:
    assert parse_entry("x", "none,flip", ("none", "flip")) == Choice("none", "flip")
    assert parse_entry("x", "none,flip", ("flip",)) == Choice(None, "flip")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uniform:0", "--vary x=uniform:0: give values as 64,128, or uniform:LOW:HIGH, log:LOW:HIGH or int:LOW:HIGH"),
        ("uniform:0:1:2", "--vary x=uniform:0:1:2: give values as"),
        ("normal:0:1", "--vary x=normal:0:1: give values as"),
        ("0.1:1", "--vary x=0.1:1: give values as 64,128, or uniform:LOW:HIGH"),
        ("1:2:3:4", "--vary x=1:2:3:4: give values as"),
        ("-1e-4:1", "--vary x=-1e-4:1: give values as"),
        ("log:1e-4:1:", "--vary x=log:1e-4:1:: give values as"),
        ("uniform:a:1", "--vary x=uniform:a:1: uniform ['a', 1]: give the two numbers LOW and HIGH"),
        ("uniform:false:true", "--vary x=uniform:false:true: uniform [False, True]: give the two numbers LOW and HIGH"),
        ("int:1.5:3", "--vary x=int:1.5:3: integers 1.5 3: give whole numbers"),
        ("int:1:inf", "--vary x=int:1:inf: integers 1 inf: give whole numbers"),
        ("int:nan:2", "--vary x=int:nan:2: integers nan 2: give whole numbers"),
    ],
)
def test_a_text_that_is_no_entry_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_entry("x", text)
    assert str(refused.value).startswith(message)


# A file's form

TOML = """
lr = {log-uniform = [1e-4, 1]}
batch_size = [64, 128]
dropout = 0.5

[regularizer.one-of]
none = {l1 = 0.0, l2 = 0.0}
l1 = {l1 = [1e-6, 1e-5], l2 = 0.0}
l2 = {l1 = 0.0, l2 = [1e-5, 1e-4, 1e-3]}
"""


def test_a_space_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text(TOML, encoding="utf-8")
    assert Space.read(path) == EXAMPLE
    path.write_text("a = {uniform = [0, 1]}\nb = {integers = [1, 4]}\nc = {fixed = [0.5, 0.75]}\nd = [[0.5], []]\n")
    assert Space.read(path) == Space(
        {"a": Uniform(0, 1), "b": Integers(1, 4), "c": (0.5, 0.75), "d": Choice((0.5,), ())}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"lr = [", "--space {path}: cannot be read as TOML (Invalid value"),
        (b"lr = '\xff'", "--space {path}: cannot be read as TOML ('utf-8' codec"),
        (b"lr = {uniform = [0]}", "--space {path}: lr: uniform [0]: give the two numbers LOW and HIGH"),
        (b"lr = {uniform = 3}", "--space {path}: lr: uniform 3: give the two numbers LOW and HIGH"),
        (b"lr = {uniform = [0, true]}", "--space {path}: lr: uniform [0, True]: give the two numbers"),
        (b"n = {integers = [1, 2.5]}", "--space {path}: n: integers 1 2.5: give whole numbers"),
        (b"n = {integers = [1, inf]}", "--space {path}: n: integers 1 inf: give whole numbers"),
        (
            b"lr = {normal = [0, 1]}",
            "--space {path}: lr: expected one of uniform, log-uniform, integers, one-of, fixed",
        ),
        (b"lr = {uniform = [0, 1], q = 1}", "--space {path}: lr: expected one of uniform"),
        (b"s = {one-of = [1, 2]}", "--space {path}: s: one-of maps the names of branches to their entries"),
        (b"s = {one-of = {a = 1}}", "--space {path}: s: one-of maps the names of branches to their entries"),
        (b"s = {one-of = {a = {x = {fix = 1}}}}", "--space {path}: s=a/x: expected one of uniform"),
        (b"lr = [{uniform = [0, 1]}]", "--space {path}: lr: expected plain values, or one-of with branches"),
        (b"lr = {fixed = {a = 1}}", "--space {path}: lr: fixed {{'a': 1}}: give a plain value"),
        (b"lr = {uniform = [1, 0]}", "--space {path}: lr: from 1.0 to 0.0: must be finite, the first smaller"),
    ],
)
def test_a_file_without_a_space_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "space.toml"
    path.write_bytes(text)
    with pytest.raises(InputError) as refused:
        Space.read(path)
    assert str(refused.value).startswith(message.format(path=path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--space .*gone\.toml: cannot be read as TOML \(.*No such file"):
        Space.read(tmp_path / "gone.toml")
