"""Trained models that outlive the code that trained them, and which of them is the champion.

A model is kept as the program that ``torch.export`` makes of it: no pickle (it is loaded without, to see that), and no
import of Concord or of the user's module to predict with it. A registered version carries the metrics that it was
judged by, so that others can be compared with it without its run.

MLflow writes an alias whatever it was before, so two runs that end at once could overwrite each other's decision. The
champion therefore follows from the versions themselves, in the order of their numbers, and who moves the alias reads
the versions again afterwards: the last one to write has seen all of them.
"""

import copy
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from concord.errors import InputError, RunFailedError
from concord.metric_name import metric_name
from concord.process_environment import environment_variables
from concord.tracking.client import error_code, failures, import_mlflow, one_line, pages
from concord.tracking.store import Store

if TYPE_CHECKING:
    import torch

CHAMPION = "champion"

# Of a version: what it was judged by, and what it is.
_METRIC = "concord.metric."
_CRITERION = "concord.criterion"
_MODE = "concord.mode"
# MLflow then refuses a model of which anything would be unpickled, be it a tensor in a ``.pt2`` archive.
_WITHOUT_PICKLE = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
_INPUTS, _OUTPUTS = "concord.inputs", "concord.outputs"
# What of a version has a tag of its name, after this.
_OWN = "concord."
_TAGGED = ("criterion", "run", "data", "unfit", "aggregator", "objective", "inputs", "outputs")
# Of a registered model: the version that was promoted by hand, with _OR_BETTER behind it if better ones may follow.
_PROMOTED = "concord.promoted"
_OR_BETTER = " or better"
# A process that registers a version has moved the alias by now, or is dead. An alias that is elsewhere was moved in
# another way than by Concord.
_DECIDED_AFTER = 60.0
_TRIES = 20


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model.

    Attributes:
        name, version: of the model, and the version's number.
        aliases: that point to it.
        metrics: of its run.
        criterion, mode: the metric that it was registered by, if any, and whether that is to be large or small.
        run_id, run: its run in MLflow, and the run's name.
        data: the version of its data, where they have one.
        unfit: why it cannot be the champion, whatever its criterion says, if so.
        aggregator, objective: that trained it; None for what was trained in another way.
        inputs, outputs: type and shape of what it takes and gives, ``float32 (-1, 34)``; -1 is any number.
        created: when it was registered, in UTC.
        promoted: it was made champion by hand.
    """

    name: str
    version: int
    aliases: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    criterion: str | None = None
    run_id: str | None = None
    mode: str = "max"
    run: str | None = None
    data: str | None = None
    unfit: str | None = None
    aggregator: str | None = None
    objective: str | None = None
    inputs: str | None = None
    outputs: str | None = None
    created: datetime = field(default_factory=lambda: datetime.fromtimestamp(0, UTC))
    promoted: bool = False

    @property
    def uri(self) -> str:
        """What ``mlflow.pyfunc.load_model`` takes."""
        return f"models:/{self.name}/{self.version}"


@dataclass(frozen=True)
class Registered:
    """What became of a model: its version, and whether it is the champion now.

    `previous` is the value of the version that it was compared with (the champion before, or the one that there is),
    None where there was nothing to compare with; `reason` says the decision in one line.
    """

    name: str
    version: int
    champion: bool
    previous: float | None
    reason: str


def log_model(
    store: Store, run_id: str, model: "torch.nn.Module", input_example: "torch.Tensor", name: str = "model"
) -> str:
    """Keep `model`, in evaluation mode on the CPU, with the run; return its URI, ``models:/m-…``.

    `input_example` is a batch, ``(rows, ...)``, of which two rows are stored (one row is used twice: a batch of one
    would make an exported program for batches of one). `model` itself is not changed. What is kept takes numbers of
    any type where the example has floating-point numbers, and otherwise the example's type alone. Raises
    RunFailedError with one line if ``torch.export`` cannot take it, fixes its batch size or keeps a part of it as a
    pickle; nothing is kept then.
    """
    import_mlflow()
    import mlflow.pytorch
    import numpy
    import torch
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model, ModelSignature, infer_signature

    from concord.tracking.exported_model import Casting

    example = input_example.detach().to("cpu")
    if example.ndim == 0 or not len(example):
        raise ValueError(f"the input example must have rows, found shape {tuple(example.shape)}")
    rows = example[[0, min(1, len(example) - 1)]].contiguous()
    with failures(store.uri, f"read run {run_id}"):
        run = store.client.get_run(run_id)

    with tempfile.TemporaryDirectory(prefix="concord-model-") as folder:
        path = Path(folder) / "model"
        description = Model(run_id=run_id)
        try:
            program = copy.deepcopy(model).to("cpu").eval()
            if rows.is_floating_point():
                program = Casting(program, rows.dtype).eval()
            with torch.no_grad():
                answer = program(rows)
            if not isinstance(answer, torch.Tensor) or answer.shape[:1] != rows.shape[:1]:
                raise TypeError("its answer to a batch is not one tensor with a row for each example")
            signature = infer_signature(rows.numpy(), answer.numpy())
            mlflow.pytorch.save_model(
                program,
                path,
                mlflow_model=description,
                signature=signature,
                input_example=rows.numpy(),
                # Given, because MLflow would find them out by loading the model in another process. Without "+cpu":
                # the machine that predicts may have another build.
                pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", f"numpy=={numpy.__version__}"],
                serialization_format="pt2",
            )
            if rows.is_floating_point():
                # MLflow would refuse any other type than the signature's, float64 for one, before the program is
                # asked, which takes them.
                description.signature = ModelSignature(outputs=signature.outputs)
                description.save(str(path / "MLmodel"))
            _check_predictions(path, rows, answer)
        except Exception as error:  # export runs the user's code: anything may come out of it
            raise RunFailedError(f"torch.export cannot take this {type(model).__name__}: {one_line(error)}") from error

        with failures(store.uri, f"keep the model of run {run_id}"):
            # MLflow's log_model would do the rest through a process-wide address and active run.
            logged = store.client.create_logged_model(
                run.info.experiment_id,
                name=name,
                source_run_id=run_id,
                params=dict(run.data.params),
                tags={_INPUTS: _described(signature.inputs), _OUTPUTS: _described(signature.outputs)},
            )
            try:
                description.artifact_path = logged.artifact_location
                description.model_id = description.model_uuid = logged.model_id
                description.save(str(path / "MLmodel"))
                store.client.log_model_artifacts(logged.model_id, str(path))
                store.client.finalize_logged_model(logged.model_id, "READY")
                store.client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, 0)])
            except Exception:
                store.client.delete_logged_model(logged.model_id)
                raise
    return f"models:/{logged.model_id}"


def register(
    store: Store,
    model_uri: str,
    run_id: str,
    registered_name: str,
    metrics: Mapping[str, float],
    criterion: str,
    mode: Literal["max", "min"],
    lineage: Mapping[str, str] | None = None,
    unfit: str | None = None,
) -> Registered:
    """Make the model at `model_uri` the next version of `registered_name`, and the champion if it is better.

    Better means strictly higher (`mode` max) or lower (min) in ``metrics[criterion]``; NaN is never better, a number
    is always better than a champion's NaN. With no champion yet, any number wins. A champion that was registered by
    another criterion is compared on this one if it has that metric; if it has not, or if the run's data have another
    version than the champion's, it stays: `promote` decides. So it does if it was promoted by hand.
    Of versions that are registered at the same time the best is the champion when all of these calls have returned.
    `lineage` is kept as tags of the version. `unfit` says why it is not to be the champion, unless by hand. A run has
    one version: one that was registered before, and killed before it could say so, gets that.
    Raises InputError for a criterion that is not in `metrics` and for a name that MLflow refuses.
    """
    if criterion not in metrics:
        raise InputError(f"criterion {criterion!r} is not among the metrics; there is: {_listed(metrics)}")
    if mode not in ("max", "min"):
        raise InputError(f"mode {mode!r} of criterion {criterion!r}: give max or min")
    tags = {f"{_METRIC}{metric_name(key)}": repr(float(each)) for key, each in metrics.items()}
    tags |= {_CRITERION: metric_name(criterion), _MODE: mode, **(lineage or {})}

    with failures(store.uri, f"register {registered_name!r}"):
        _ensure_name(store, registered_name)
        run = store.client.get_run(run_id)
        known = {
            f"{_OWN}run": run.info.run_name,
            f"{_OWN}data": run.data.tags.get(f"{_OWN}data"),
            f"{_OWN}unfit": unfit,
            **{f"{_OWN}{name}": run.data.params.get(name) for name in ("aggregator", "objective")},
        }
        model_id = model_uri.removeprefix("models:/") if model_uri.startswith("models:/m-") else None
        source = model_uri
        if model_id:
            logged = store.client.get_logged_model(model_id)
            known |= {key: logged.tags.get(key) for key in (_INPUTS, _OUTPUTS)}
            if store.artifacts is not None:
                # A database store would look the id up in the process-wide store, which may be another one.
                source = logged.artifact_location
        tags |= {key: value for key, value in known.items() if value}
        before = next((each.version for each in _versions(store, registered_name) if each.run_id == run_id), None)
        if before is None:
            entry = store.client.create_model_version(registered_name, source, run_id, tags=tags, model_id=model_id)
            before = int(entry.version)
        return _decide(store, registered_name, before)


def add_lineage(store: Store, run_id: str, registered: Registered | None, lineage: Mapping[str, str]) -> None:
    """Tag a run, and the version that was made of it, as :func:`register` does where it is told of the lineage."""
    with failures(store.uri, f"tag run {run_id}"):
        for key, value in lineage.items():
            store.client.set_tag(run_id, key, value)
            if registered is not None:
                store.client.set_model_version_tag(registered.name, str(registered.version), key, value)


def models(store: Store) -> list[ModelVersion]:
    """Return every version of every registered model, by name, the newest version first."""
    with failures(store.uri, "read the model registry"):
        search = store.client.search_registered_models
        entries = pages(lambda token: search(order_by=["name ASC"], page_token=token))
        return [version for entry in entries for version in _versions(store, entry.name)]


def show(store: Store, name: str, version_or_alias: str | int = CHAMPION) -> ModelVersion:
    """Return one version by its number or by an alias, with or without ``@``. Raises InputError if it is not there."""
    wanted = str(version_or_alias).removeprefix("@")
    with failures(store.uri, f"read model {name!r}"):
        versions = _versions(store, name)
        names = [] if versions else sorted(entry.name for entry in store.client.search_registered_models())
    if not versions:
        raise InputError(f"no model {name!r} in the registry; there is: {_listed(names)}")
    for each in versions:
        if wanted == str(each.version) or wanted in each.aliases:
            return each
    there = [str(each.version) for each in versions] + sorted(alias for each in versions for alias in each.aliases)
    raise InputError(f"model {name!r} has no version or alias {wanted!r}; there is: {_listed(there)}")


def load_program(store: Store, version: ModelVersion) -> "torch.nn.Module":
    """The program that a version is, on the CPU: it predicts, and has gradients by its parameters.

    Raises RunFailedError if its files cannot be read, or if anything in them would have to be unpickled.
    """
    import_mlflow()
    import mlflow.artifacts
    import mlflow.pytorch

    with failures(store.uri, f"load {version.uri}"), tempfile.TemporaryDirectory(prefix="concord-model-") as folder:
        source = store.client.get_model_version_download_uri(version.name, str(version.version))
        if source.startswith("models:/m-"):
            source = store.client.get_logged_model(source.removeprefix("models:/")).artifact_location
        path = mlflow.artifacts.download_artifacts(source, dst_path=folder, tracking_uri=store.uri)
        try:
            with environment_variables(_WITHOUT_PICKLE):
                program: torch.nn.Module = mlflow.pytorch.load_model(path, map_location="cpu")
        except Exception as error:  # whatever PyTorch's reader raises
            raise RunFailedError(f"{version.uri}: cannot be loaded ({one_line(error)})") from error
    return program


def promote(store: Store, name: str, version: str | int, or_better: bool = False) -> ModelVersion:
    """Make `version` of `name` the champion, whatever the metrics say, and return the champion.

    It stays the champion: later versions do not take its place, however good. With `or_better` those that are
    better by their criterion do, the ones that there are already, too.
    Raises InputError if the version is not there.
    """
    chosen = show(store, name, version)
    with failures(store.uri, f"promote {name!r}"):
        # Before the alias: a run that ends in between must see that this was by hand.
        store.client.set_registered_model_tag(name, _PROMOTED, f"{chosen.version}{_OR_BETTER if or_better else ''}")
        store.client.set_registered_model_alias(name, CHAMPION, str(chosen.version))
        if or_better:
            _move_champion(store, name)
    return show(store, name)


@dataclass(frozen=True)
class _Standing:
    """Which version is the champion, whether by hand, who came first by hand, and all versions, oldest first."""

    champion: ModelVersion | None
    by_hand: bool
    first: ModelVersion | None
    versions: list[ModelVersion]


def _decide(store: Store, name: str, version: int) -> Registered:
    """Point ``champion`` to the version that it belongs to, and return what became of the new version."""
    standing = _move_champion(store, name)
    ours = next(each for each in standing.versions if each.version == version)
    assert ours.criterion is not None
    rival, won = standing.champion, standing.champion is not None and standing.champion.version == version
    if won:
        rival = _best([each for each in standing.versions if each.version < version], standing.first)
    better, previous, reason = _compare(rival, ours)
    if standing.by_hand and standing.champion is not None:
        reason = f"version {standing.champion.version} was promoted by hand and stays"
        if better and not won:
            value = f"{ours.criterion} {ours.metrics[ours.criterion]:g}"
            reason += f"; version {version} is better ({value}): concord models promote {name} {version}"
    return Registered(name, version, won, previous, reason)


def _move_champion(store: Store, name: str) -> _Standing:
    """Point the alias to the version that is the champion."""
    written: int | None = None
    for _ in range(_TRIES):
        # The alias first: whoever moves it after this has seen the versions that are read now.
        entry = store.client.get_registered_model(name)
        versions = sorted(_versions(store, name), key=lambda each: each.version)
        numbers = {each.version: each for each in versions}
        held = entry.aliases.get(CHAMPION)
        alias = None if held is None or int(held) not in numbers else int(held)
        promoted, or_better = _promoted(entry.tags.get(_PROMOTED), numbers)
        first = numbers[promoted] if promoted is not None else None
        wanted: ModelVersion | None
        if first is not None and not or_better:
            # Where this process moved the alias while somebody promoted, it moves it back; where another did, that
            # one does, or the alias was moved by hand once more.
            wanted, by_hand = (first if alias in (None, written) else numbers[alias]), True
        elif by_hand := alias is not None and alias != written and alias not in _plausible(versions, first):
            wanted = numbers[alias]
        else:
            wanted = _best(versions, first)
        if wanted is None or wanted.version == alias:
            return _Standing(wanted, by_hand, first, versions)
        store.client.set_registered_model_alias(name, CHAMPION, str(wanted.version))
        written = wanted.version
    raise RunFailedError(f"the champion of {name!r} is being moved again and again by others")


def _promoted(tag: str | None, numbers: Mapping[int, ModelVersion]) -> tuple[int | None, bool]:
    """Which of the versions was promoted by hand, if one was, and whether better ones may take its place."""
    number = (tag or "").removesuffix(_OR_BETTER)
    if not number.isdecimal() or int(number) not in numbers:
        return None, False
    return int(number), str(tag).endswith(_OR_BETTER)


def _best(versions: Sequence[ModelVersion], first: ModelVersion | None) -> ModelVersion | None:
    """The champion among the versions, oldest first, if `first` was it before all others."""
    champion = first
    for each in versions:
        if each.criterion is not None and (champion is None or each.version != champion.version):
            champion = each if _compare(champion, each)[0] else champion
    return champion


def _plausible(versions: Sequence[ModelVersion], first: ModelVersion | None) -> set[int]:
    """The versions that the alias may point to because others are registering, too."""
    newest = max(each.created for each in versions)
    resolve = sum((newest - each.created).total_seconds() > _DECIDED_AFTER for each in versions)
    found = (_best(versions[:count], first) for count in range(resolve, len(versions) + 1))
    return {each.version for each in found if each is not None}


def _check_predictions(path: Path, rows: "torch.Tensor", answer: "torch.Tensor") -> None:
    """Predict with what was saved, as a user will: the exporter may have fixed the batch size without a word."""
    import mlflow.pyfunc
    import numpy

    # On the CPU, where it was exported: MLflow would take a GPU, if there is one, and refuse the program.
    with environment_variables(_WITHOUT_PICKLE):
        predict = mlflow.pyfunc.load_model(str(path), model_config={"device": "cpu"}).predict
    for size in (1, 5):
        repeated, expected = (numpy.resize(each.numpy(), (size, *each.shape[1:])) for each in (rows, answer))
        if size > 1 and rows.is_floating_point():
            repeated = repeated.astype(numpy.float64)
        try:
            predicted = predict(repeated)
        except Exception as error:
            raise ValueError(f"the exported program does not take a batch of {size} ({one_line(error)})") from error
        if not numpy.allclose(predicted, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError("the exported program answers otherwise than the model")


def _ensure_name(store: Store, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(name)
    except MlflowException as error:
        if error_code(error) == "INVALID_PARAMETER_VALUE":
            raise InputError(f"model name {name!r}: {one_line(error)}") from None
        if error_code(error) != "RESOURCE_ALREADY_EXISTS":
            raise


def _compare(champion: ModelVersion | None, other: ModelVersion) -> tuple[bool, float | None, str]:
    """Return whether `other` takes the champion's place by its own criterion, the champion's value, and why."""
    assert other.criterion is not None
    criterion, mode = other.criterion, other.mode
    value = other.metrics.get(criterion, math.nan)
    previous = champion.metrics.get(criterion) if champion else None
    if other.unfit is not None:
        return False, previous, other.unfit
    if math.isnan(value):
        return False, previous, f"{criterion} is NaN"
    if champion is None:
        return True, None, "the first champion"
    if other.data is not None and champion.data is not None and other.data != champion.data:
        return (
            False,
            None,
            f"not compared with champion version {champion.version}: its data are {champion.data}, these {other.data}; "
            "promote one of them",
        )
    if previous is None:
        by = f", only {champion.criterion}" if champion.criterion else ""
        return False, None, f"champion version {champion.version} has no {criterion}{by}; promote one of them"
    better = math.isnan(previous) or (value > previous if mode == "max" else value < previous)
    word = "better than" if better else "not better than"
    return better, previous, f"{criterion} {value:g} is {word} {previous:g} of version {champion.version} ({mode})"


def _versions(store: Store, name: str) -> list[ModelVersion]:
    """Return the versions of `name`, newest first; none if there is no such model."""
    from mlflow.exceptions import MlflowException

    try:
        # A search for versions leaves the aliases out; the model itself has them.
        model = store.client.get_registered_model(name)
    except MlflowException as error:
        if error_code(error) in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return []
        raise
    aliases: Mapping[str, object] = model.aliases
    promoted = (model.tags.get(_PROMOTED) or "").removesuffix(_OR_BETTER)
    quote = '"' if "'" in name else "'"
    wanted = f"name = {quote}{name}{quote}"
    found = []
    for entry in pages(lambda token: store.client.search_model_versions(wanted, page_token=token)):
        named = sorted(alias for alias, version in aliases.items() if str(version) == str(entry.version))
        tags = entry.tags
        found.append(
            ModelVersion(
                name=entry.name,
                version=int(entry.version),
                aliases=tuple(named),
                metrics={key.removeprefix(_METRIC): float(tags[key]) for key in tags if key.startswith(_METRIC)},
                run_id=entry.run_id or None,
                mode=tags.get(_MODE, "max"),
                created=datetime.fromtimestamp(entry.creation_timestamp / 1000, UTC),
                promoted=CHAMPION in named and promoted == str(entry.version),
                **{part: tags.get(f"{_OWN}{part}") for part in _TAGGED},
            )
        )
    return sorted(found, key=lambda each: -each.version)


def _listed(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(names) or "nothing yet"


def _described(schema: Any) -> str:
    """Type and shape of the one tensor that a signature has."""
    tensor = schema.inputs[0]
    return f"{tensor.type} {tuple(tensor.shape)}"
