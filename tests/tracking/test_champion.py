"""The champion among a model's versions, on real MLflow stores, for any order of registering and promoting."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from concord.environments import Environments
from concord.execution.finish import scored_on
from concord.tracking import Registered, Store, models, promote, register, show
from concord.tracking.registry import CHAMPION


@pytest.fixture
def store(store: Store) -> Iterator[Store]:
    yield store
    store.__dict__.pop("client", None)  # whatever a test put in front of it


def registered(
    store: Store, name: str, value: float, criterion: str = "accuracy", data: str | None = None, **more: float
) -> Registered:
    """A version of `name` whose run has nothing but tags: what the champion is chosen by."""
    run_id = store.start_run("champions", "a run", {}, {} if data is None else {"concord.data": data})
    return register(store, f"runs:/{run_id}/model", run_id, name, {criterion: value, **more}, criterion, "max")


def champion(store: Store, name: str) -> int:
    return show(store, name).version


class Meanwhile:
    """An MLflow client in front of which something else happens just before it moves the champion for the first time:
    what another process does after this one has decided, and before it writes."""

    def __init__(self, client: Any, happens: Callable[[], object]) -> None:
        self._client = client
        self._happens: Callable[[], object] | None = happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def set_registered_model_alias(self, *arguments: Any) -> None:
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()
        self._client.set_registered_model_alias(*arguments)


def interrupted(store: Store, happens: Callable[[Store], object]) -> None:
    """Let something happen, by another process at the same store, before `store` moves its next champion."""
    other = Store(store.uri, store.artifacts)
    store.__dict__["client"] = Meanwhile(other.client, lambda: happens(Store(store.uri, store.artifacts)))


@pytest.mark.parametrize(("first", "second"), [(0.6, 0.9), (0.9, 0.6)])
def test_of_two_runs_that_end_at_once_the_better_wins(store: Store, first: float, second: float) -> None:
    name = f"at once {first} {second}"
    registered(store, name, 0.5)
    others: list[Registered] = []
    interrupted(store, lambda other: others.append(registered(other, name, second)))
    ours = registered(store, name, first)
    best = ours if first > second else others[0]
    assert champion(store, name) == best.version
    assert (ours.version, ours.champion) == (2, first > second)
    if first < second:
        assert ours.reason == "accuracy 0.6 is not better than 0.9 of version 3 (max)"


def together(stores: list[Store], name: str, values: list[float]) -> list[Registered]:
    """Register a version with each store at once."""
    start, became = threading.Barrier(len(values)), []

    def one(store: Store, value: float) -> None:
        start.wait()
        became.append(registered(store, name, value))

    threads = [threading.Thread(target=one, args=pair) for pair in zip(stores, values, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return became


def the_best_of_those_at_once_is_the_champion(stores: list[Store], name: str) -> None:
    registered(stores[0], name, 0.1)
    became = together(stores, name, [0.7, 0.9, 0.8])
    assert len(became) == 3
    assert show(stores[0], name).metrics["accuracy"] == 0.9


@pytest.mark.parametrize("attempt", range(3))
def test_however_many_register_at_once_the_best_is_the_champion(store: Store, attempt: int) -> None:
    stores = [Store(store.uri, store.artifacts) for _ in range(3)]
    the_best_of_those_at_once_is_the_champion(stores, f"together {attempt}")


def test_what_was_promoted_by_hand_stays_and_the_better_version_is_named(store: Store) -> None:
    registered(store, "kept", 0.5)
    registered(store, "kept", 0.9)
    assert promote(store, "kept", 1).promoted
    worse, better = registered(store, "kept", 0.4), registered(store, "kept", 0.95)
    assert (worse.champion, worse.reason) == (False, "version 1 was promoted by hand and stays")
    assert not better.champion
    assert better.reason == (
        "version 1 was promoted by hand and stays; version 4 is better (accuracy 0.95): concord models promote kept 4"
    )
    assert champion(store, "kept") == 1
    assert promote(store, "kept", 4).version == 4
    assert not registered(store, "kept", 0.99).champion


def test_what_was_promoted_or_better_gives_way_to_what_is_better(store: Store) -> None:
    registered(store, "gives way", 0.9)
    registered(store, "gives way", 0.5)
    promote(store, "gives way", 2)
    assert promote(store, "gives way", 2, or_better=True).version == 1
    assert registered(store, "gives way", 0.95).champion
    assert not registered(store, "gives way", 0.92).champion


def test_what_is_promoted_while_a_run_registers_stays(store: Store) -> None:
    registered(store, "meanwhile", 0.5)
    registered(store, "meanwhile", 0.6)
    interrupted(store, lambda other: promote(other, "meanwhile", 1))
    ours = registered(store, "meanwhile", 0.9)
    assert (ours.champion, champion(store, "meanwhile")) == (False, 1)


def test_an_alias_that_was_moved_in_mlflow_itself_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concord.tracking.registry.DECIDED_AFTER", -1.0)  # as if the versions were a minute old
    registered(store, "moved", 0.5)
    registered(store, "moved", 0.9)
    store.client.set_registered_model_alias("moved", CHAMPION, "1")
    ours = registered(store, "moved", 0.95)
    assert (ours.champion, champion(store, "moved")) == (False, 1)
    assert "promoted by hand" in ours.reason


def test_a_champion_that_was_deleted_leaves_the_next_best(store: Store) -> None:
    for value in (0.5, 0.7, 0.9):
        registered(store, "deleted", value)
    store.client.delete_model_version("deleted", "3")
    assert not registered(store, "deleted", 0.6).champion
    assert champion(store, "deleted") == 2


def test_versions_of_other_data_are_not_compared_and_it_is_said(store: Store) -> None:
    registered(store, "data", 0.5, data="a1")
    other = registered(store, "data", 0.9, data="b2")
    assert not other.champion
    assert other.reason == (
        "not compared with champion version 1: its data are a1, these b2; concord models promote data 2 makes it the "
        "champion"
    )
    assert registered(store, "data", 0.6, data="a1").champion
    assert promote(store, "data", 2, or_better=True).version == 2
    assert registered(store, "data", 0.95, data="b2").champion
    assert registered(store, "data", 0.97).champion  # nothing is known of its data
    assert [each.data for each in models(store) if each.name == "data"] == [None, "b2", "a1", "b2", "a1"]


def test_versions_scored_in_other_environments_are_not_compared_and_it_is_said(store: Store) -> None:
    def scored(area: float, scored_on: str | None) -> Registered:
        run_id = store.start_run("champions", "a run", {}, {"concord.data": "a1"})
        source = f"runs:/{run_id}/model"
        return register(store, source, run_id, "scored", {"auc": area}, "auc", "max", scored_on=scored_on)

    scored(0.5, "cleveland, va")
    easier = scored(0.9, "cleveland, hungarian")
    assert not easier.champion
    assert easier.reason == (
        "not compared with champion version 1: it was scored on cleveland, va, this one on cleveland, hungarian; "
        "concord models promote scored 2 makes it the champion"
    )
    assert scored(0.6, "cleveland, va").champion
    assert show(store, "scored").scored_on == "cleveland, va"
    assert scored(0.7, None).champion  # registered by an earlier Concord


def test_many_environments_that_score_are_told_apart_by_a_digest() -> None:
    first, second, again = (
        scored_on("train_loss", Environments(lambda _: None, list(names)))
        for names in ("abcdefghij", "abcdefghik", "jihgfedcba")
    )
    assert first == again
    assert first != second
    assert str(first).startswith("10 environments (")


def test_a_version_that_is_unfit_is_no_champion_unless_by_hand(store: Store) -> None:
    def least(spread: float, unfit: str | None = None) -> Registered:
        run_id = store.start_run("champions", "a run", {}, {})
        source = f"runs:/{run_id}/model"
        return register(store, source, run_id, "unfit", {"spread": spread}, "spread", "min", unfit=unfit)

    untrained = least(0.0, "accuracy 0.5 is below 0.625")
    assert (untrained.champion, untrained.reason) == (False, "accuracy 0.5 is below 0.625")
    assert least(0.2).champion
    assert not least(0.001, "accuracy 0.51 is below 0.625").champion
    assert least(0.1).champion
    assert promote(store, "unfit", 1).unfit == "accuracy 0.5 is below 0.625"


def test_a_card_says_whom_the_champion_replaced_and_who_replaced_it(store: Store) -> None:
    def carded(value: float) -> Registered:
        run_id = store.start_run("champions", "a run", {}, {})
        source = f"runs:/{run_id}/model"
        return register(
            store, source, run_id, "card", {"auc": value}, "auc", "max", card=lambda uri: f"The card of {uri}"
        )

    def description(version: int) -> str:
        return str(store.client.get_model_version("card", str(version)).description)

    carded(0.5)
    assert description(1) == "The card of models:/card/1\n\n### Champion\n\nYes: the first champion."
    carded(0.4)
    assert description(2).endswith("\n\n### Champion\n\nNo: auc 0.4 is not better than 0.5 of version 1 (max).")
    carded(0.9)
    reason = "auc 0.9 is better than 0.5 of version 1 (max)"
    assert description(3).endswith(f"\n\nIt replaced version 1: {reason}.")
    assert description(1).endswith(f"\n\nNo longer: version 3 replaced it: {reason}.")
    promote(store, "card", 2)
    assert description(2) == "The card of models:/card/2\n\n### Champion\n\nIt was promoted by hand."
    assert description(3).endswith("\n\nNo longer: version 2 replaced it.")
    promote(store, "card", 2, or_better=True)
    assert description(3).endswith("\n\nYes: it is better than version 2, which was promoted by hand.")
