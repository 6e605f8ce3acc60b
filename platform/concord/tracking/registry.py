"""The model registry: versions of models, and which of them is the champion.

A version has two tags that later versions are compared by, its score and the version of its data, so its run is not
needed. Other metrics, the rule, inputs and outputs are those of its logged model. Its description is a model card.

MLflow writes an alias unconditionally, so two runs that end at once could overwrite each other's decision. So the
champion follows from the versions, in the order of their numbers, and the process that moves the alias reads the
versions again afterwards: the last writer has seen all of them.
"""

import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from concord.errors import InputError, RunFailedError
from concord.metric_name import metric_name
from concord.redaction import redact
from concord.tracking.client import failures, pages, unless
from concord.tracking.store import OWNER, Store, stored_value

CHAMPION = "champion"

_METHOD_OPTIONS = ("aggregator", "objective", "network")
# The tags of a version.
SCORE, DATA, RUN, METHOD, STUDY = "concord.score", "concord.data", "concord.run", "concord.method", "concord.study"
OWNED = "concord.owner"
# The part of a version's description that says whether it is the champion, and why.
_STANDING = "\n\n### Champion\n\n"
_VERSIONS = "mlflow.modelVersions"  # the tag of a logged model by which MLflow shows its versions
# Tag of a registered model: the version promoted by hand, followed by _OR_BETTER if better ones may replace it.
_PROMOTED, _OR_BETTER = "concord.promoted", " or better"
# Seconds after which a process that registered a version has moved the alias or is dead. An alias on another version
# was moved outside of Concord.
DECIDED_AFTER = 60.0
_TRIES = 20


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model.

    Attributes:
        criterion, mode: the metric of its registration, if any, and the metric's mode.
        run_id, run: its run in MLflow, and the run's name.
        owner: the user whose run it is, if known.
        data: the version of its data, if there is one.
        scored_on: the environments in which the criterion was measured, if known.
        unfit: the reason why it cannot be the champion, if there is one.
        aggregator, objective, network: of its training; None if it has none.
        inputs, outputs: type and shape, such as ``float32 (-1, 34)``; -1 is any number.
        created: the time of registration, in UTC.
        promoted: whether it was made champion by hand.
        model_id: of its logged model, which has the metrics, except the criterion's, and what is known of the training.
    """

    name: str
    version: int
    aliases: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    criterion: str | None = None
    run_id: str | None = None
    mode: str = "max"
    run: str | None = None
    owner: str | None = None
    data: str | None = None
    scored_on: str | None = None
    unfit: str | None = None
    aggregator: str | None = None
    objective: str | None = None
    network: str | None = None
    inputs: str | None = None
    outputs: str | None = None
    created: datetime = field(default_factory=lambda: datetime.fromtimestamp(0, UTC))
    promoted: bool = False
    model_id: str | None = None

    @property
    def uri(self) -> str:
        """The URI for ``mlflow.pyfunc.load_model``."""
        return f"models:/{self.name}/{self.version}"

    @property
    def trained_by(self) -> str:
        """The aggregator, and the objective unless it is the plain mean; of a baseline, which has neither, its name."""
        return _trained_by(self.aggregator, self.objective, self.network)


def _trained_by(aggregator: str | None, objective: str | None, network: str | None) -> str:
    named = ", ".join(filter(None, (aggregator, objective if objective != "erm" else None)))
    return named or network or ""


@dataclass(frozen=True)
class Registered:
    """A registered model: its version, whether it is the champion, and the reason in one line."""

    name: str
    version: int
    champion: bool
    reason: str


def register(
    store: Store,
    model_uri: str,
    run_id: str,
    registered_name: str,
    metrics: Mapping[str, float],
    criterion: str,
    mode: Literal["max", "min"],
    unfit: str | None = None,
    scored_on: str | None = None,
    study: str | None = None,
    card: Callable[[str], str] | None = None,
    step: int = 0,
    at: int | None = None,
) -> Registered:
    """Make the model at `model_uri` the next version of `registered_name`, and the champion if it is better.

    Better means strictly higher (`mode` max) or lower (min) in ``metrics[criterion]``; NaN is never better, a number
    is always better than a champion's NaN. With no champion yet, any number wins. A champion that was registered by
    another criterion is compared on this one if it has the metric. It stays if it lacks the metric, if the run's data
    have another version, if it was scored on other environments, or if it was promoted by hand; then `promote` decides.
    If versions are registered at the same time, the best is the champion when all calls have returned.
    `unfit` is the reason why the version cannot be the champion, unless by hand. `scored_on` names the environments in
    which the criterion was measured, `study` the study whose best trial it is. `card` makes the version's description
    of its URI. The metrics become those of the logged model; `step` and `at` are theirs, see `Store.log_metrics`.
    A run has one version: if it was killed after registering one, it gets that.
    """
    client = store.client
    with failures(store.uri, f"register {registered_name!r}"):
        with unless("RESOURCE_ALREADY_EXISTS"):
            client.create_registered_model(registered_name)
        run = client.get_run(run_id)
        params, tags = run.data.params, run.data.tags
        score: dict[str, Any] = {"metric": metric_name(criterion), "mode": mode}
        score["value"] = {metric_name(key): float(value) for key, value in metrics.items()}[score["metric"]]
        score |= {name: value for name, value in (("scored_on", scored_on), ("unfit", unfit)) if value}
        model_id = model_uri.removeprefix("models:/") if model_uri.startswith("models:/m-") else None
        if model_id is not None:
            store.log_metrics(run_id, metrics, step, at, model_id)
            score["model"] = model_id
            if store.artifacts is not None:
                # A database store would look up the id in the process-wide store, which may be another one.
                model_uri = client.get_logged_model(model_id).artifact_location
        method = _trained_by(*(params.get(name) for name in _METHOD_OPTIONS))
        shown = {DATA: tags.get(DATA), RUN: run.info.run_name, METHOD: method, STUDY: study}
        shown[OWNED] = tags.get(OWNER)
        tags = {SCORE: json.dumps(score), **{name: value for name, value in shown.items() if value}}

        def make() -> int:
            made = client.create_model_version(registered_name, model_uri, run_id, tags=tags, model_id=model_id)
            return int(made.version)

        def find() -> int | None:
            versions = _read(store, registered_name).versions
            return next((each.version for each in versions if each.run_id == run_id), None)

        version = store.create(make, find, unsure=True)
        if model_id is not None:
            _name_version(store, model_id, registered_name, version)
        before_alias = _read(store, registered_name).alias
        model, champion, by_hand = _move_champion(store, registered_name)

    made = next(each for each in model.versions if each.version == version)
    won = champion is not None and champion.version == version
    before = [each for each in model.versions if each.version < version]
    better, reason = _compare(_best(before, model.promoted) if won else champion, made)
    if by_hand and champion is not None:
        reason = f"version {champion.version} was promoted by hand and stays"
        if better and not won:
            value = f"{made.criterion} {made.metrics[str(made.criterion)]:g}"
            reason += f"; version {version} is better ({value}): concord models promote {registered_name} {version}"
    uri = f"models:/{registered_name}/{version}"
    with failures(store.uri, f"describe {uri}"):
        replaced = before_alias if before_alias is not None and before_alias.version != version else None
        if won and replaced is not None:
            standing = f"It replaced version {replaced.version}: {reason}."
            _describe(store, replaced, f"No longer: version {version} replaced it: {reason}.")
        else:
            standing = f"{'Yes' if won else 'No'}: {reason}."
        _describe(store, made, standing, None if card is None else card(uri))
    return Registered(registered_name, version, won, reason)


def _describe(store: Store, version: ModelVersion, standing: str, card: str | None = None) -> None:
    """Say in the version's description whether it is the champion, and why; a new ``card`` replaces the old one."""
    name, number = version.name, str(version.version)
    if card is None:
        card = (store.client.get_model_version(name, number).description or "").partition(_STANDING)[0]
    store.client.update_model_version(name, number, f"{card}{_STANDING}{standing}".strip())


def _name_version(store: Store, model_id: str, name: str, version: int) -> None:
    """Show the version on MLflow's page of its logged model, as a server does by itself."""
    known = json.loads(store.client.get_logged_model(model_id).tags.get(_VERSIONS, "[]"))
    if (new := {"name": name, "version": version}) not in known:
        store.client.set_logged_model_tags(model_id, {_VERSIONS: json.dumps([*known, new])})


def models(store: Store) -> list[ModelVersion]:
    """Return every version of every registered model, by name, the newest version first."""
    with failures(store.uri, "read the model registry"):
        search = store.client.search_registered_models
        entries = pages(lambda token: search(order_by=["name ASC"], page_token=token))
        found = (version for entry in entries for version in reversed(_read(store, entry.name).versions))
        return [_completed(store, version) for version in found]


def champions(store: Store) -> list[str]:
    """The names of the models with a champion, the model that changed last first."""
    with failures(store.uri, "read the model registry"):
        search = store.client.search_registered_models
        entries = pages(lambda token: search(order_by=["last_updated_timestamp DESC"], page_token=token))
        return [entry.name for entry in entries if CHAMPION in entry.aliases]


def serve_command(store: str, model: str) -> str:
    """The lines that serve a model, ``models:/NAME@ALIAS``, of this store over HTTP; without the store's password."""
    where = f"MLFLOW_TRACKING_URI={shlex.quote(redact(store))}"
    return f"{where} \\\n  mlflow models serve --model-uri {shlex.quote(model)} --env-manager local --port 5001"


def show(store: Store, name: str, version_or_alias: str | int = CHAMPION) -> ModelVersion:
    """Return one version by its number or by an alias, with or without ``@``. Raises InputError if there is none."""
    wanted = str(version_or_alias).removeprefix("@")
    with failures(store.uri, f"read model {name!r}"):
        versions = _read(store, name).versions
        if not versions:
            available = sorted(entry.name for entry in store.client.search_registered_models())
            raise InputError(f"no model {name!r} in the registry; it has {', '.join(available) or 'none yet'}")
    for each in versions:
        if wanted == str(each.version) or wanted in each.aliases:
            with failures(store.uri, f"read {each.uri}"):
                return _completed(store, each)
    available = [
        *(str(each.version) for each in versions),
        *sorted(alias for each in versions for alias in each.aliases),
    ]
    raise InputError(f"model {name!r} has no version or alias {wanted!r}; it has {', '.join(available)}")


def promote(store: Store, name: str, version: str | int, or_better: bool = False) -> ModelVersion:
    """Make `version` of `name` the champion, regardless of metrics, and return the champion.

    Later versions do not replace it. With `or_better` any version that is better by its criterion does, earlier ones
    included.
    Raises InputError if there is no such version.
    """
    chosen = show(store, name, version)
    with failures(store.uri, f"promote {name!r}"):
        before = _read(store, name).alias
        # Before the alias: a run that ends in between must see the promotion.
        store.client.set_registered_model_tag(name, _PROMOTED, f"{chosen.version}{_OR_BETTER if or_better else ''}")
        store.client.set_registered_model_alias(name, CHAMPION, str(chosen.version))
        if or_better:
            _move_champion(store, name)
        champion = show(store, name)
        how = "It was promoted by hand" + ("; a better version replaces it." if or_better else ".")
        if champion.version != chosen.version:
            how = f"Yes: it is better than version {chosen.version}, which was promoted by hand."
        _describe(store, champion, how)
        for each in (chosen, before):
            if each is not None and each.version != champion.version:
                _describe(store, each, f"No longer: version {champion.version} replaced it.")
    return champion


def versions_of_runs(store: Store, run_ids: Collection[str]) -> list[ModelVersion]:
    """The versions of all models that come from these runs."""
    with failures(store.uri, "read the model registry"):
        entries = pages(lambda token: store.client.search_registered_models(page_token=token))
        found = (version for entry in entries for version in _read(store, entry.name).versions)
        return [version for version in found if version.run_id in run_ids]


def require_deletable(version: ModelVersion) -> None:
    """Refuse to delete a champion (InputError)."""
    if CHAMPION in version.aliases:
        again = f"concord models promote {version.name} VERSION"
        raise InputError(f"{version.uri}: is the champion of {version.name}; promote another version first: {again}")


def delete_version(store: Store, version: ModelVersion) -> None:
    """Delete a version, and the registered model with its last one; the logged model and its run stay."""
    with failures(store.uri, f"delete {version.uri}"), unless("RESOURCE_DOES_NOT_EXIST"):
        store.client.delete_model_version(version.name, str(version.version))
        if not _read(store, version.name).versions:
            store.client.delete_registered_model(version.name)


def deleted_version(store: Store, uri: str | None) -> str | None:
    """Say of a version, ``models:/NAME/VERSION``, that the registry has it no longer; None of any other model."""
    name, _, number = (uri or "").removeprefix("models:/").rpartition("/")
    if not name:
        return None
    with suppress(RunFailedError), failures(store.uri, f"read {uri}"):  # the store may not answer
        if all(str(each.version) != number for each in _read(store, name).versions):
            return f"{uri} was deleted from the registry; MLflow keeps the model with its run"
    return None


@dataclass(frozen=True)
class _Model:
    """A registered model: its versions, oldest first, the version with the alias, and the one promoted by hand."""

    versions: list[ModelVersion]
    alias: ModelVersion | None = None
    promoted: ModelVersion | None = None
    or_better: bool = False


def _read(store: Store, name: str) -> _Model:
    """Read a registered model; a missing one has no versions."""
    # The alias first: a process that moves it later has seen the versions that are read here. A search for versions has
    # no aliases.
    with unless("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
        model = store.client.get_registered_model(name)
        by_hand = model.tags.get(_PROMOTED, "")
        quote = '"' if "'" in name else "'"
        wanted = f"name = {quote}{name}{quote}"
        versions = []
        for entry in pages(lambda token: store.client.search_model_versions(wanted, page_token=token)):
            number, tags = str(entry.version), entry.tags
            aliases = tuple(sorted(alias for alias, version in model.aliases.items() if str(version) == number))
            score = json.loads(tags.get(SCORE, "{}"))
            versions.append(
                ModelVersion(
                    name=entry.name,
                    version=int(number),
                    aliases=aliases,
                    metrics={score["metric"]: float(score["value"])} if score else {},
                    criterion=score.get("metric"),
                    run_id=entry.run_id or None,
                    mode=score.get("mode", "max"),
                    run=tags.get(RUN),
                    owner=tags.get(OWNED),
                    data=tags.get(DATA),
                    scored_on=score.get("scored_on"),
                    unfit=score.get("unfit"),
                    created=datetime.fromtimestamp(entry.creation_timestamp / 1000, UTC),
                    promoted=CHAMPION in aliases and by_hand.removesuffix(_OR_BETTER) == number,
                    model_id=score.get("model"),
                )
            )
        if len({each.criterion for each in versions if each.criterion is not None}) > 1:
            versions = [_completed(store, each) for each in versions]  # compared by metrics that are no criterion
        versions.sort(key=lambda each: each.version)
        alias = next((each for each in versions if CHAMPION in each.aliases), None)
        promoted = next((each for each in versions if str(each.version) == by_hand.removesuffix(_OR_BETTER)), None)
        return _Model(versions, alias, promoted, by_hand.endswith(_OR_BETTER))
    return _Model([])


def _completed(store: Store, version: ModelVersion) -> ModelVersion:
    """The version with what its logged model has; as it is if that was deleted."""
    with unless("RESOURCE_DOES_NOT_EXIST"):
        if version.model_id is not None:
            model = store.client.get_logged_model(version.model_id)
            metrics = {
                each.key: stored_value(each.value) for each in model.metrics or () if each.run_id == version.run_id
            }
            known = {name: model.params.get(name) for name in _METHOD_OPTIONS}
            known |= {name: model.tags.get(f"concord.{name}") for name in ("inputs", "outputs")}
            return replace(version, metrics={**metrics, **version.metrics}, **known)
    return version


def _move_champion(store: Store, name: str) -> tuple[_Model, ModelVersion | None, bool]:
    """Point the alias to the champion; return the model, the champion, and whether it was promoted by hand."""
    written: int | None = None
    for _ in range(_TRIES):
        model = _read(store, name)
        alias = model.alias.version if model.alias else None
        champion: ModelVersion | None
        if model.promoted is not None and not model.or_better:
            # If this process moved the alias during a promotion, move it back; leave an alias that another process or a
            # user moved.
            champion, by_hand = (model.promoted if alias in (None, written) else model.alias), True
        elif by_hand := alias is not None and alias != written and alias not in _plausible(model):
            champion = model.alias
        else:
            champion = _best(model.versions, model.promoted)
        if champion is None or champion.version == alias:
            return model, champion, by_hand
        store.client.set_registered_model_alias(name, CHAMPION, str(champion.version))
        written = champion.version
    raise RunFailedError(f"the champion of {name!r} is being moved repeatedly by other processes")


def _best(versions: Sequence[ModelVersion], first: ModelVersion | None) -> ModelVersion | None:
    """The champion among the versions, oldest first, starting with `first`."""
    champion = first
    for each in versions:
        if each.criterion is not None and each != first and _compare(champion, each)[0]:
            champion = each
    return champion


def _plausible(model: _Model) -> set[int]:
    """The versions that the alias may have while other processes register."""
    newest = max(each.created for each in model.versions)
    decided = sum((newest - each.created).total_seconds() > DECIDED_AFTER for each in model.versions)
    counts = range(decided, len(model.versions) + 1)
    return {best.version for count in counts if (best := _best(model.versions[:count], model.promoted)) is not None}


def _compare(champion: ModelVersion | None, other: ModelVersion) -> tuple[bool, str]:
    """Return whether `other` replaces the champion by its own criterion, and why."""
    assert other.criterion is not None
    criterion, mode = other.criterion, other.mode
    value = other.metrics.get(criterion, math.nan)
    if other.unfit is not None:
        return False, other.unfit
    if math.isnan(value):
        return False, f"{criterion} is NaN"
    if champion is None:
        return True, "the first champion"
    rival, promote = f"champion version {champion.version}", f"concord models promote {other.name} {other.version}"
    for what, before, now in (
        ("its data are {}, these {}", champion.data, other.data),
        ("it was scored on {}, this one on {}", champion.scored_on, other.scored_on),
    ):
        if before is not None and now is not None and before != now:
            return False, f"not compared with {rival}: {what.format(before, now)}; {promote} makes it the champion"
    if (previous := champion.metrics.get(criterion)) is None:
        by = f", only {champion.criterion}" if champion.criterion else ""
        return False, f"{rival} has no {criterion}{by}; {promote} makes this one the champion"
    better = math.isnan(previous) or (value > previous if mode == "max" else value < previous)
    word = "better than" if better else "not better than"
    return better, f"{criterion} {value:g} is {word} {previous:g} of version {champion.version} ({mode})"
