"""Search: suggestions lie in the space and depend only on seed and observations; the space."""

import collections
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_space import points, spaces

from concord.aggregation import AGGREGATORS
from concord.errors import InputError
from concord.job_files import built_in_jobs
from concord.options import option_values, options_of
from concord.space import Choice, Integers, LogUniform, OneOf, Point, Space, Uniform, contains
from concord.studies.search import (
    OwnPoint,
    Search,
    chosen_study,
    config_at,
    derived,
    first_points,
    own_point,
    study_space,
    wide,
)
from concord.studies.study_options import StudyOptions
from concord.training import Study, TrainConfig, load_job

claim = settings(max_examples=15, deadline=None)
varied_spaces = spaces().filter(lambda space: bool(space.varied()))
KINDS: tuple[Literal["tpe", "random"], ...] = ("tpe", "random")

BRANCHED = Space(
    {
        "x": Uniform(-5, 5),
        "batch_size": Choice(64, 128),
        "kind": OneOf({"near": {"y": Uniform(-5, 5)}, "far": {"n": Integers(1, 5), "rate": LogUniform(1e-3, 1)}}),
    }
)


def domains(space: Space, name: str) -> list[Any]:
    """Every domain of this name, of whichever branch."""
    return [located.domain for located in space.varied() if located.name == name]


def score(point: Point) -> float:
    """A quadratic, whose maximum, 0, is on the branch ``near``."""
    distance: Any = (point["x"] - 1) ** 2  # type: ignore[operator]
    return -distance - ((point["y"] + 2) ** 2 if point["kind"] == "near" else 3 + point["n"])  # type: ignore[operator]


def searched(search: Search, numbers: range) -> list[Point]:
    """One trial at a time."""
    found = []
    for number in numbers:
        point = search.suggest(number)
        assert point is not None
        search.observe(number, point, score(point))
        found.append(point)
    return found


# Suggestions


@claim
@given(st.data())
def test_every_suggestion_lies_in_the_space(data: st.DataObject) -> None:
    space = data.draw(varied_spaces)
    search = Search(space, data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 99)), [], startup=2)
    for number in range(5):
        point = search.suggest(number)
        assert point is not None
        active = {located.name for located in space.active(point)}
        assert set(point) == active  # what does not apply is not there
        search.observe(number, point, data.draw(st.floats(-1, 1)))
    assert search.size is None


@claim
@given(st.data())
def test_a_search_takes_observations_of_any_point_of_the_space(data: st.DataObject) -> None:
    space = data.draw(varied_spaces)
    search = Search(space, "tpe", 0, [], startup=1)
    for number in range(3):
        observed = data.draw(points(space))
        list(space.active(observed))  # raises for a point that a search would ignore
        search.observe(number, observed, float(number))
    point = search.suggest(3)
    assert point is not None
    list(space.active(point))


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_told_its_observations_again_proposes_the_same(kind: Any) -> None:
    count = 14
    whole = Search(BRANCHED, kind, 3, [], startup=5)
    expected = searched(whole, range(count))
    for killed_after in range(count):
        restored = Search(BRANCHED, kind, 3, [], startup=5)
        for number, point in enumerate(expected[:killed_after]):
            restored.observe(number, point, score(point))
        assert searched(restored, range(killed_after, min(killed_after + 2, count))) == expected[killed_after:][:2]


def test_a_suggestion_is_the_same_however_often_it_is_asked_for() -> None:
    search = Search(BRANCHED, "tpe", 0, [], startup=3)
    searched(search, range(6))
    expected = {number: search.suggest(number) for number in (9, 6, 7)}
    assert {number: search.suggest(number) for number in (6, 7, 9)} == expected
    assert len({repr(point) for point in expected.values()}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_suggestions_depend_on_the_seed(kind: Any) -> None:
    of_seed = [searched(Search(BRANCHED, kind, seed, [], startup=3), range(6)) for seed in (0, 1, 2, 0)]
    assert of_seed[0] == of_seed[3]
    assert len({repr(point) for found in of_seed[:3] for point in found}) == 18


def test_tree_parzen_suggestions_depend_on_scores_and_only_after_the_start() -> None:
    told, otherwise, chance = (
        Search(BRANCHED, kind, 0, [], startup=5)  # type: ignore[arg-type]
        for kind in ("tpe", "tpe", "random")
    )
    for number in range(5):
        point = chance.suggest(number)
        assert point is not None
        assert told.suggest(number) == otherwise.suggest(number) == point
        told.observe(number, point, score(point))
        otherwise.observe(number, point, -score(point))
        chance.observe(number, point, score(point))
    assert chance.suggest(5) == Search(BRANCHED, "random", 0, [], startup=5).suggest(5)
    assert len({repr(search.suggest(5)) for search in (told, otherwise, chance)}) == 3


def test_tree_parzen_finds_more_than_chance() -> None:
    """On a quadratic with a branch; larger scores are better."""
    best = {
        kind: statistics.median(
            max(map(score, searched(Search(BRANCHED, kind, seed, [], startup=10), range(36)))) for seed in range(7)
        )
        for kind in KINDS
    }
    assert best["tpe"] > best["random"] / 2
    assert best["tpe"] > -0.6


def test_chance_is_even_where_the_space_says_so() -> None:
    """Both ends of whole numbers are as likely as the rest."""
    space = Space(
        {
            "three": Integers(1, 3),
            "zero": Integers(-1, 1),
            "two": Integers(0, 1),
            "choice": Choice("a", "b", "c"),
            "switch": OneOf({"a": {}, "b": {"on b": Integers(7, 8)}, "c": {}}),
            "linear": Uniform(-1, 2),
            "log": LogUniform(1e-4, 1e-1),
        }
    )
    search = Search(space, "random", 0, [], startup=1)
    drawn = [search.suggest(number) for number in range(400)]
    even = {
        "three": [1, 2, 3],
        "zero": [-1, 0, 1],
        "two": [0, 1],
        "choice": ["a", "b", "c"],
        "switch": ["a", "b", "c"],
        "on b": [7, 8],
    }
    for name, expected in even.items():
        there = [point[name] for point in drawn if point is not None and name in point]
        counts = collections.Counter(there)
        assert sorted(counts) == expected
        each = len(there) / len(expected)
        assert all(abs(count - each) < 4 * each**0.5 for count in counts.values()), (name, counts)
    for name, thirds in {"linear": (0.0, 1.0), "log": (1e-3, 1e-2)}.items():
        numbers = [point[name] for point in drawn if point is not None]
        parts = collections.Counter((number > thirds[0]) + (number > thirds[1]) for number in numbers)  # type: ignore[operator]
        assert all(abs(parts[part] - 400 / 3) < 4 * (400 / 3) ** 0.5 for part in range(3)), (name, parts)


def test_observations_off_the_space_are_ignored() -> None:
    search, undisturbed = (Search(BRANCHED, "tpe", 0, [], startup=3) for _ in range(2))
    searched(search, range(4))
    searched(undisturbed, range(4))
    point = search.suggest(4)
    assert point is not None
    for number, wrong in enumerate([{"batch_size": 65}, {"x": 9.0}, {"kind": "middle"}, {"z": 1.0}]):
        search.observe(10 + number, {**point, **wrong}, 100.0)
    assert search.suggest(4) == undisturbed.suggest(4) == point


@pytest.mark.parametrize("best", [True, 1])
def test_true_and_one_are_two_choices(best: Any) -> None:
    search = Search(Space({"x": Choice(True, 1)}), "tpe", 0, [], startup=1)
    for number in range(20):
        value = (True, 1)[number % 2]
        search.observe(number, {"x": value}, float(value is best))
    found = [search.suggest(number) for number in range(20, 40)]
    assert sum(point is not None and point["x"] is best for point in found) >= 15


@pytest.mark.parametrize("kind", ["tpe", "random", "grid"])
def test_first_points_come_first(kind: Any) -> None:
    space = BRANCHED.without({"x", "y", "rate"})
    first: list[Point] = [{"batch_size": 128, "kind": "far", "n": 2}, {"batch_size": 64, "kind": "near"}]
    search = Search(space, kind, 0, first, startup=3)
    assert [search.suggest(0), search.suggest(1)] == first
    point = search.suggest(0)
    assert point is not None
    point["batch_size"] = 0
    assert search.suggest(0) == first[0]
    third = search.suggest(2)
    assert third is not None
    list(space.active(third))


@claim
@given(st.integers(0, 5), st.data())
def test_a_grid_search_suggests_every_point_once(seed: int, data: st.DataObject) -> None:
    space = Space({"a": Choice(1, 2), "n": Integers(3, 5), "s": OneOf({"x": {}, "y": {"b": Choice("p", "q")}})})
    first = data.draw(st.lists(st.sampled_from(space.grid()), max_size=3, unique_by=repr))
    search = Search(space, "grid", seed, first, startup=1)
    assert search.size == 2 * 3 * 3
    found = [search.suggest(number) for number in range(18)]
    assert found[: len(first)] == first
    assert sorted(map(repr, found)) == sorted(map(repr, space.grid()))
    assert search.suggest(18) is None


def test_a_grid_search_over_a_continuous_domain_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"--search grid: x is a number from -5 to 5; list its values, as in --vary x="
    ):
        Search(BRANCHED, "grid", 0, [], startup=1)


# The space of a study


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    flip: Literal["none", "random"] = "none"
    crop: float | None = None
    widths: tuple[int, int] = (8, 8)
    title: str = ""


BASE = Config()
MASKED = BASE.with_options(aggregator="and-mask")
REGULARIZED = Space(
    {
        "lr": LogUniform(1e-4, 1),
        "dropped": OneOf({"none": {"l1": 0.0, "l2": 0.0}, "l1": {"l1": Choice(1e-5, 1e-4), "l2": 0.0}}),
        "threshold": Uniform(0, 1),
        "optimizer": "sgd",
    }
)


def options(**given: Any) -> StudyOptions:
    return StudyOptions(**given)


@settings(max_examples=25, deadline=None)
@given(
    st.floats(1e-6, 1e2),
    st.integers(1, 1000),
    st.sampled_from(list(AGGREGATORS)),
    st.data(),
    st.sampled_from([derived, wide]),
)
def test_the_spaces_for_every_job_fit_every_configuration(
    lr: float, batch_size: int, aggregator: Any, data: st.DataObject, made: Any
) -> None:
    base = TrainConfig().with_options(lr=lr, batch_size=batch_size, aggregator=aggregator)
    space = study_space(made(base), options(), set(), base)
    assert space == made(base)
    config_at(base, space, data.draw(points(space))).check()
    assert any(contains(domain, lr) for domain in domains(derived(base), "lr"))
    assert any(contains(domain, batch_size) for domain in domains(derived(base), "batch_size"))
    by_signs = aggregator.endswith("mask") or aggregator == "geometric-mean"
    assert ("threshold" in derived(base).names()) == (by_signs and aggregator != "t-mask")
    assert ("significance" in derived(base).names()) == (aggregator == "t-mask")


def test_the_advised_wide_space() -> None:
    assert wide(BASE) == Space(
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


@claim
@given(st.sets(st.sampled_from(["lr", "l1", "l2", "threshold", "rescale", "batch_size", "epochs"]), max_size=5))
def test_options_given_on_the_command_line_leave_the_space(given_options: set[str]) -> None:
    masked = BASE.with_options(aggregator="and-mask")
    space = study_space(derived(masked), options(), given_options, masked)
    assert not space.names() & given_options
    assert space.names() == derived(masked).names() - given_options - (
        {"penalty"} if {"l1", "l2"} <= given_options else set()
    )


def test_a_switch_on_which_nothing_hangs_any_more_leaves_the_space_too() -> None:
    penalty = Space({"penalty": derived(BASE).entries["penalty"]})
    assert study_space(penalty, options(), {"l1"}, BASE) == penalty.without({"l1"})
    with pytest.raises(InputError, match=r"the space is empty: nothing is varied; give --vary NAME=VALUES or --space"):
        study_space(penalty, options(), {"l1", "l2"}, BASE)
    # Unless it is an option itself.
    space = Space({"aggregator": OneOf({"mean": {}, "and-mask": {"threshold": Uniform(0, 1)}})})
    assert study_space(space, options(), {"threshold"}, BASE).grid() == [
        {"aggregator": "mean"},
        {"aggregator": "and-mask"},
    ]


def test_what_the_command_line_varies_takes_the_place_of_what_was_declared() -> None:
    space = study_space(REGULARIZED, options(vary=("l1=log:1e-6:1", "--batch-size=32,64")), {"threshold"}, BASE)
    assert space == Space(
        {
            "lr": LogUniform(1e-4, 1),
            "dropped": OneOf({"none": {"l2": 0.0}, "l1": {"l2": 0.0}}),
            "optimizer": "sgd",
            "l1": LogUniform(1e-6, 1),
            "batch_size": Choice(32, 64),
        }
    )
    fixed = study_space(REGULARIZED, options(vary=("lr=0.5",)), set(), BASE)
    assert fixed.fixed({"dropped": "l1"}) == {"l2": 0.0, "optimizer": "sgd", "lr": 0.5}
    texts = study_space(REGULARIZED, options(vary=("flip=none,random", "crop=none,0.5")), set(), BASE)
    assert texts.entries["flip"] == Choice("none", "random")
    assert texts.entries["crop"] == Choice(None, 0.5)


def test_a_file_takes_the_place_of_what_was_declared(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text("lr = [0.1, 0.2]\nwidths = [[8, 8], [16, 16]]\n")
    space = study_space(REGULARIZED, options(space=path, vary=("l2=0,1e-4",)), set(), BASE)
    assert space == Space({"lr": Choice(0.1, 0.2), "widths": Choice((8, 8), (16, 16)), "l2": Choice(0, 1e-4)})


@pytest.mark.parametrize(
    ("vary", "given_options", "message"),
    [
        (("lr=0.1,0.2",), {"lr"}, "--vary lr: contradicts --lr, which fixes it"),
        (("batch-size=1,2",), {"batch_size"}, "--vary batch_size: contradicts --batch-size, which fixes it"),
        (("lr=1,2", "lr=3"), set(), "--vary lr=3: lr is given twice"),
        (("lr",), set(), "--vary lr: give NAME=VALUES, such as lr=log:1e-4:1 or batch_size=64,128"),
        (("lr=",), set(), "--vary lr=: give NAME=VALUES"),
        (("=1,2",), set(), "--vary =1,2: give NAME=VALUES"),
        (("lr=1:2",), set(), "--vary lr=1:2: give values as 64,128, or uniform:LOW:HIGH"),
        (("lr=1,1",), set(), "--vary lr=1,1: one of 1, 1: a value appears twice"),
        (("lr=log:0:1",), set(), "--vary lr=log:0:1: log-uniform from 0.0: must be above 0"),
        (
            ("inertia=0.9,0.99",),
            set(),
            "space: inertia: the job has no such option; it has accumulate, address, aggregator,",
        ),
        (("dropped=none,l1",), set(), "space: dropped: the job has no such option; did you mean drop_grad?"),
        (("threshold=uniform:0:1.5",), set(), "space: --threshold 1.5: the agreement threshold must lie in [0, 1]"),
        (("threshold=1.2",), set(), "space: --threshold 1.2: the agreement threshold must lie in [0, 1]"),
        (("lr=0.1,nan",), set(), "space: --lr nan: must be a finite number above 0"),
        (("l1=-1,0",), set(), "space: --l1 -1: must not be negative"),
        (("batch_size=0,64",), set(), "space: --batch-size 0: must be at least 1"),
        (("batch_size=int:0:64",), set(), "space: --batch-size 0: must be at least 1"),
        (("batch_size=uniform:32:64",), set(), "space: batch_size 32.0: must be a whole number"),
        (("batch_size=64,true",), set(), "space: batch_size True: must be a whole number"),
        (("lr=0.1,fast",), set(), "space: lr fast: must be a number"),
        (("lr=0.1,none",), set(), "space: lr None: must be a number"),
        (("rescale=0,1",), set(), "space: rescale 0: must be true or false"),
        (("optimizer=adam,lion",), set(), "space: optimizer lion: must be one of adam, adamw, sgd"),
        (("flip=no,none",), set(), "space: flip no: must be one of none, random"),
        (("title=a,2",), set(), "space: title 2: must be text"),
        (("milestones=0.5,0.75",), set(), "space: milestones 0.5: must be a list, each a number"),
        (("seed=1,2,3",), set(), "space: seed: decides how a trial is scored, so it cannot be varied"),
        (("held_out=0.1,0.2",), set(), "space: held_out: decides how a trial is scored"),
        (
            ("workers=1,2",),
            set(),
            "space: workers: decides where and how a run works, not what it learns, so it cannot",
        ),
        (("evaluations=5,9",), set(), "space: evaluations: decides how a trial is scored"),
    ],
)
def test_what_cannot_be_varied_is_refused(vary: tuple[str, ...], given_options: set[str], message: str) -> None:
    with pytest.raises(InputError) as refused:
        study_space(REGULARIZED, options(vary=vary), given_options, BASE)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Space({}), "the space is empty"),
        (Space({"lr": 0.1}), "the space is empty"),
        (Space({"s": OneOf({"a": {"l3": 0.1}})}), "space: l3: the job has no such option"),
        (Space({"s": OneOf({"a": {"threshold": 2.0}})}), "space: --threshold 2.0: the agreement threshold must lie"),
        (Space({"lr": Choice(0.1, 1), "threshold": 2.0}), "space: --threshold 2.0: the agreement threshold must lie"),
        (Space({"optimizer": OneOf({"lion": {"lr": 0.1}})}), "space: optimizer lion: must be one of adam, adamw, sgd"),
        (Space({"milestones": Choice((0.5,), ("a",))}), "space: milestones ('a',): must be a list, each a number"),
        (
            Space({"widths": Choice((1, 2), (1, 2, 3))}),
            "space: widths (1, 2, 3): must be a list of a whole number, a whole number",
        ),
        (
            Space({"widths": Choice((1, 2.5))}),
            "space: widths (1, 2.5): must be a list of a whole number, a whole number",
        ),
    ],
)
def test_what_a_job_declares_has_to_fit_its_configuration(space: Space, message: str) -> None:
    with pytest.raises(InputError) as refused:
        study_space(space, options(), set(), BASE)
    assert str(refused.value).startswith(message)


def test_a_switch_may_be_an_option() -> None:
    space = Space({"aggregator": OneOf({"mean": {}, "and-mask": {"threshold": Choice(0.5, 1.0), "l1": 0.25}})})
    assert study_space(space, options(), set(), BASE) == space
    assert config_at(BASE, space, {"aggregator": "mean"}) == BASE.with_options(aggregator="mean")
    assert config_at(BASE, space, {"aggregator": "and-mask", "threshold": 0.5}) == BASE.with_options(
        aggregator="and-mask", threshold=0.5, l1=0.25
    )


def test_a_configuration_has_fixed_and_chosen_values_and_no_switch() -> None:
    point: Point = {"lr": 0.5, "dropped": "l1", "l1": 1e-4, "threshold": 0.25}
    assert config_at(BASE, REGULARIZED, point) == BASE.with_options(
        lr=0.5, l1=1e-4, l2=0.0, threshold=0.25, optimizer="sgd"
    )


# First points


def test_first_points_of_the_command_line_come_before_those_of_the_job() -> None:
    found = first_points(REGULARIZED, ["lr=0.1,dropped=l1", "dropped=none, threshold=0.5"], [{"lr": 1, "threshold": 1}])
    assert found == [
        {"lr": 0.1, "dropped": "l1", "l1": 1e-5, "threshold": 0},  # what is left out is the first of the space
        {"lr": 1e-4, "dropped": "none", "threshold": 0.5},
        {"lr": 1, "dropped": "none", "threshold": 1},
    ]
    for point in found:
        list(REGULARIZED.active(point))
    space = Space({"flip": Choice("none", "random"), "crop": Choice(None, 0.5), "batch_size": Choice(1, 2)})
    assert first_points(space, ["batch-size=2,flip=none,crop=none"], []) == [
        {"flip": "none", "crop": None, "batch_size": 2}
    ]


def test_suggestions_may_name_what_the_command_line_fixed() -> None:
    suggestions: list[Point] = [{"lr": 0.1, "dropped": "l1", "l1": 1e-5, "threshold": 0.5}]
    without_l1 = study_space(REGULARIZED, options(), {"l1"}, BASE)
    assert first_points(without_l1, [], suggestions) == [{"lr": 0.1, "dropped": "l1", "threshold": 0.5}]
    narrowed = study_space(REGULARIZED, options(vary=("lr=0.2,0.3",)), set(), BASE)
    assert first_points(narrowed, [], suggestions) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "--suggest lr: give NAME=VALUE,NAME=VALUE"),
        ("lr=0.1,", "--suggest lr=0.1,: give NAME=VALUE,NAME=VALUE"),
        ("lr=2", "--suggest lr=2: lr 2 is not in the space"),
        ("lr=0", "--suggest lr=0: lr 0 is not in the space"),
        ("lr=uniform:0:1", "--suggest lr=uniform:0:1: lr uniform:0:1 is not in the space"),
        ("dropped=l3", "--suggest dropped=l3: dropped l3 is not in the space"),
        (
            "optimizer=adam",
            "--suggest optimizer=adam: optimizer is not varied here; a point is lr 0.0001, dropped none,",
        ),
        ("l1=1e-5", "--suggest l1=1e-5: l1 is not varied here; a point is"),
        ("epochs=3", "--suggest epochs=3: epochs is not varied here; a point is"),
    ],
)
def test_a_first_point_off_the_space_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        first_points(REGULARIZED, [text], [])
    assert str(refused.value).startswith(message)


def test_the_method_is_the_one_named_or_the_first_of_the_job_or_derived() -> None:
    studies = {"mine": Study(REGULARIZED, stop_when=("train_loss<0.1",)), "other": Study(BRANCHED)}
    assert chosen_study(studies, options(), BASE) == ("mine", studies["mine"])
    assert chosen_study(studies, options(method="other"), BASE) == ("other", studies["other"])
    assert chosen_study(studies, options(method="wide"), BASE) == ("wide", Study(wide(BASE)))
    assert chosen_study({}, options(), BASE) == ("derived", Study(derived(BASE)))
    with pytest.raises(InputError) as refused:
        chosen_study(studies, options(method="best"), BASE)
    assert str(refused.value) == "--method best: there is no such method; there are mine, other, derived, wide"


@pytest.mark.parametrize("vary", ["threshold=uniform:0:1", "--significance=1e-4,1e-2"])
def test_a_varied_option_of_masks_makes_the_derived_space_that_of_a_mask(vary: str) -> None:
    _, average = chosen_study({}, options(), TrainConfig())
    _, mask = chosen_study({}, options(vary=(vary,)), TrainConfig())
    assert mask.space.entries.keys() - average.space.entries.keys() == {"threshold", "rescale"}
    assert mask == chosen_study({}, options(), TrainConfig().with_options(aggregator="and-mask"))[1]


@pytest.mark.parametrize(
    ("job", "method"),
    [(name, method) for name in built_in_jobs() for method in getattr(load_job(name).job, "studies", {})],
)
def test_every_study_of_the_built_in_jobs_can_begin(job: str, method: str) -> None:
    study = load_job(job).job.studies[method]
    needed = {"data": Path("photographs")} if job == "image-domains" else {}
    base = load_job(job).job.config.with_options(**needed)
    assert study_space(study.space, options(), set(), base).varied()


# The job's own settings


@pytest.mark.parametrize(
    ("space", "base", "point", "moved"),
    [
        (REGULARIZED, BASE, {"lr": 1e-3, "dropped": "none", "threshold": 0.8}, {}),
        (
            REGULARIZED,
            BASE.with_options(lr=1e-6, l1=1e-5),
            {"lr": 1e-4, "dropped": "l1", "l1": 1e-5, "threshold": 0.8},
            {"lr": 1e-6},
        ),
        # Of a switch the branch with the fewest settings off; of numbers the nearest; of words the first.
        (REGULARIZED, BASE.with_options(l1=9e-5), {"lr": 1e-3, "dropped": "none", "threshold": 0.8}, {"l1": 9e-5}),
        (Space({"batch_size": Choice(32, 100), "flip": Choice("random")}), BASE, {"batch_size": 100, "flip": "random"},
         {"batch_size": 128, "flip": "none"}),
        (Space({"batch_size": Integers(1, 64), "crop": Uniform(0.1, 1)}), BASE, {"batch_size": 64, "crop": 0.1},
         {"batch_size": 128, "crop": None}),
        (Space({"widths": Choice((16, 16), (8, 8)), "crop": Choice(0.5, None)}), BASE, {"widths": (8, 8), "crop": None},
         {}),
        # What a fixed or an earlier option decides counts, and a switch may be an option.
        (Space({"objective": "irm", "penalty_weight": Choice(10.0, 1e4)}), BASE, {"penalty_weight": 1e4}, {}),
        (Space({"aggregator": Choice("mean", "and-mask")}), MASKED, {"aggregator": "and-mask"}, {}),
        (Space({"aggregator": Choice("mean", "auto")}), BASE, {"aggregator": "auto"}, {}),
        (Space({"aggregator": OneOf({"mean": {}, "and-mask": {"threshold": Uniform(0, 0.5)}})}), MASKED,
         {"aggregator": "and-mask", "threshold": 0.5}, {"threshold": 0.8}),
        (wide(MASKED), MASKED, {"lr": 1e-3, "l2": 1e-5, "aggregator": "and-mask", "threshold": 0.8, "rescale": True,
                            "optimizer": "adam"}, {"l2": 0.0}),
    ],
)  # fmt: skip
def test_the_point_of_a_jobs_own_settings_is_the_nearest_in_the_space(
    space: Space, base: Config, point: Point, moved: Point
) -> None:
    own = own_point(space, base, 8)
    assert own is not None
    assert (own.point, own.moved) == (point, moved)
    list(space.active(own.point))
    assert OwnPoint.read(json.loads(json.dumps(asdict(own)))) == own


def test_settings_that_contradict_each_other_in_the_space_are_no_point() -> None:
    couples = Space({"objective": Choice("vrex"), "lr": Uniform(0.1, 1)})
    assert own_point(couples, BASE.with_options(aggregator="and-mask")) is None
    assert own_point(couples, BASE) is not None


@claim
@given(st.floats(1e-6, 1e2), st.integers(1, 1000), st.sampled_from(list(AGGREGATORS)), st.sampled_from([derived, wide]))
def test_every_configuration_has_a_point_in_the_spaces_for_every_job(
    lr: float, batch_size: int, aggregator: Any, made: Any
) -> None:
    base = TrainConfig().with_options(lr=lr, batch_size=batch_size, aggregator=aggregator).resolve()
    base = base.with_options(**base.strictness(32))
    own = own_point(made(base), base)
    assert own is not None
    list(made(base).active(own.point))
    if made is derived:
        assert config_at(base, made(base), own.point) == base


# What options stand for


def test_what_an_option_stands_for_follows_the_options_that_are_varied() -> None:
    space = study_space(REGULARIZED, options(vary=("objective=erm,irm,vrex",)), {"threshold"}, BASE)
    expected = {"erm": {"aggregator": "mean"}} | {
        name: {"aggregator": "mean", "penalty_weight": 1e4} for name in ("irm", "vrex")
    }
    for name, stands_for in expected.items():
        point: Point = {"lr": 0.1, "dropped": "none", "objective": name}
        config = config_at(BASE, space, point)
        assert config.aggregation.aggregator == "auto"
        assert option_values(config.resolve()).items() >= stands_for.items()
        config.check()


def test_zero_epochs_of_the_synthetic_job_follow_its_environments() -> None:
    base = load_job("synthetic").job.config
    space = study_space(Space({}), options(vary=("environments=30,300", "epochs=0,7")), set(), base)
    asked: list[Point] = [{"environments": 300, "epochs": epochs} for epochs in (0, 7)]
    assert [option_values(config_at(base, space, each).resolve())["epochs"] for each in asked] == [10, 7]


given = TrainConfig().with_options


@pytest.mark.parametrize(
    ("config", "unused", "used"),
    [
        (MASKED, {"momentum", "beta3", "temporal_threshold", "bias_correction", "penalty_weight", "inner_lr",
                  "domain_units", "stop_from", "example_gradient", "regularization"},
         {"beta1", "beta2", "threshold", "rescale", "decay"}),
        (given(optimizer="sgd", l2=0.1), {"beta1", "beta2", "beta3"}, {"momentum", "regularization"}),
        (given(optimizer="temporal-and-mask"), {"momentum"}, {"beta1", "beta3", "temporal_threshold"}),
        (given(objective="irm", penalty_warmup=0.5), {"threshold", "rescale", "inner_steps"},
         {"penalty_weight", "penalty_warmup", "penalty_estimator"}),
        (given(objective="meta-irm"), {"penalty_estimator", "representation"}, {"inner_lr", "drop_grad"}),
        (given(objective="dann", milestones=()), {"decay", "inner_lr"}, {"domain_units", "representation"}),
        (given(objective="fishr"), {"domain_units", "quantile"},
         {"penalty_weight", "representation", "variance_momentum"}),
        (given(objective="eqrm"), {"penalty_weight", "group_rate", "representation"}, {"penalty_warmup", "quantile"}),
        (given(objective="group-dro"), {"penalty_weight", "penalty_warmup", "mixup_alpha"}, {"group_rate"}),
        (given(per_example=True, stop_spread=0.1), set(), {"example_gradient", "stop_from"}),
        (load_job("memorization").job.config, {"hidden_units", "batch_norm"}, {"data", "model"}),
        (load_job("memorization").job.config.with_options(model="mlp"), set(), {"hidden_units", "batch_norm"}),
        (load_job("coinrun-expert").job.config, {"overlap", "gpus_per_runner"}, {"lr"}),
        (load_job("coinrun-expert").job.config.with_options(runners=2), set(), {"overlap", "gpus_per_runner"}),
    ],
)  # fmt: skip
def test_a_configuration_knows_which_of_its_options_nothing_looks_at(
    config: Any, unused: set[str], used: set[str]
) -> None:
    found = config.resolve().unused()
    names = options_of(type(config)).keys()
    assert unused <= found <= names
    assert not used & found
    assert used <= names
