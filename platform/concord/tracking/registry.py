"""Trained models that outlive the code that trained them, and which of them is the champion.

A model is kept as the program that ``torch.export`` makes of it: no pickle (it is loaded without, to see that), and no
import of Concord or of the user's module to predict with it. A registered version carries the metrics that it was
judged by, so that the next one can be compared with the champion without its run.
"""

import contextlib
import copy
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from concord.errors import InputError, RunFailedError
from concord.tracking.client import error_code, failures, import_mlflow, metric_name, one_line
from concord.tracking.store import Store

if TYPE_CHECKING:
    import torch

CHAMPION = "champion"

_METRIC = "concord.metric."
_CRITERION = "concord.criterion"
_MODE = "concord.mode"
_ALLOW_PICKLE = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model. `criterion` is the metric that it was registered by, if any."""

    name: str
    version: int
    aliases: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    criterion: str | None = None
    run_id: str | None = None

    @property
    def uri(self) -> str:
        """What ``mlflow.pyfunc.load_model`` takes."""
        return f"models:/{self.name}/{self.version}"


@dataclass(frozen=True)
class Registered:
    """What became of a model: its version, and whether it is the champion now.

    `previous` is the value of the champion that it was compared with, None where there was nothing to compare with;
    `reason` says the decision in one line.
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
    would make an exported program for batches of one). `model` itself is not changed. Raises RunFailedError with
    one line if ``torch.export`` cannot take it, fixes its batch size or keeps a part of it as a pickle; nothing is kept
    then.
    """
    import_mlflow()
    import mlflow.pytorch
    import numpy
    import torch
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model, infer_signature

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
            with torch.no_grad():
                answer = program(rows)
            if not isinstance(answer, torch.Tensor) or answer.shape[:1] != rows.shape[:1]:
                raise TypeError("its answer to a batch is not one tensor with a row for each example")
            mlflow.pytorch.save_model(
                program,
                path,
                mlflow_model=description,
                signature=infer_signature(rows.numpy(), answer.numpy()),
                input_example=rows.numpy(),
                # Given, because MLflow would find them out by loading the model in another process. Without "+cpu":
                # the machine that predicts may have another build.
                pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", f"numpy=={numpy.__version__}"],
                serialization_format="pt2",
            )
            _check_batch_sizes(path, rows, answer)
        except Exception as error:  # export runs the user's code: anything may come out of it
            raise RunFailedError(f"torch.export cannot take this {type(model).__name__}: {one_line(error)}") from error

        with failures(store.uri, f"keep the model of run {run_id}"):
            # MLflow's log_model would do the rest through a process-wide address and active run.
            logged = store.client.create_logged_model(
                run.info.experiment_id, name=name, source_run_id=run_id, params=dict(run.data.params)
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
) -> Registered:
    """Make the model at `model_uri` the next version of `registered_name`, and the champion if it is better.

    Better means strictly higher (`mode` max) or lower (min) in ``metrics[criterion]``; NaN is never better, a number
    is always better than a champion's NaN. With no champion yet, any number wins. A champion that was registered by
    another criterion is compared on this one if it has that metric; if it has not, it stays: `promote` decides.
    `lineage` is kept as tags of the version. A run has one version: one that was registered before, and killed before
    it could say so, gets that.
    Raises InputError for a criterion that is not in `metrics` and for a name that MLflow refuses.
    """
    if criterion not in metrics:
        raise InputError(f"criterion {criterion!r} is not among the metrics; there is: {_listed(metrics)}")
    if mode not in ("max", "min"):
        raise InputError(f"mode {mode!r} of criterion {criterion!r}: give max or min")
    value = float(metrics[criterion])
    tags = {f"{_METRIC}{metric_name(key)}": repr(float(each)) for key, each in metrics.items()}
    tags |= {_CRITERION: metric_name(criterion), _MODE: mode, **(lineage or {})}

    with failures(store.uri, f"register {registered_name!r}"):
        _ensure_name(store, registered_name)
        model_id = model_uri.removeprefix("models:/") if model_uri.startswith("models:/m-") else None
        source = model_uri
        if model_id and store.artifacts is not None:
            # A database store would look the id up in the process-wide store, which may be another one.
            source = store.client.get_logged_model(model_id).artifact_location
        known = next((each for each in _versions(store, registered_name) if each.run_id == run_id), None)
        if known is not None and CHAMPION in known.aliases:
            return Registered(registered_name, known.version, True, None, f"version {known.version} is the champion")
        if known is not None:
            version = known.version
        else:
            entry = store.client.create_model_version(registered_name, source, run_id, tags=tags, model_id=model_id)
            version = int(entry.version)
        better, previous, reason = _compare(_champion(store, registered_name), metric_name(criterion), value, mode)
        if better:
            store.client.set_registered_model_alias(registered_name, CHAMPION, str(version))
    return Registered(registered_name, version, better, previous, reason)


def models(store: Store) -> list[ModelVersion]:
    """Return every version of every registered model, by name, the newest version first."""
    found: list[ModelVersion] = []
    with failures(store.uri, "read the model registry"):
        token: str | None = ""
        while token is not None:
            page = store.client.search_registered_models(order_by=["name ASC"], page_token=token or None)
            for entry in page:
                found.extend(_versions(store, entry.name))
            token = page.token or None
    return found


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


def promote(store: Store, name: str, version: str | int) -> ModelVersion:
    """Make `version` of `name` the champion, whatever the metrics say. Raises InputError if it is not there."""
    chosen = show(store, name, version)
    with failures(store.uri, f"promote {name!r}"):
        store.client.set_registered_model_alias(name, CHAMPION, str(chosen.version))
    return show(store, name, chosen.version)


def _check_batch_sizes(path: Path, rows: "torch.Tensor", answer: "torch.Tensor") -> None:
    """Predict with what was saved, as a user will: the exporter may have fixed the batch size without a word."""
    import mlflow.pyfunc
    import numpy

    with _without_pickle():
        predict = mlflow.pyfunc.load_model(str(path)).predict
    for size in (1, 5):
        repeated, expected = (numpy.resize(each.numpy(), (size, *each.shape[1:])) for each in (rows, answer))
        try:
            predicted = predict(repeated)
        except Exception as error:
            raise ValueError(f"the exported program does not take a batch of {size} ({one_line(error)})") from error
        if not numpy.allclose(predicted, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError("the exported program answers otherwise than the model")


@contextlib.contextmanager
def _without_pickle() -> Iterator[None]:
    """Let MLflow refuse a model of which anything would have to be unpickled, be it a tensor in a ``.pt2`` archive."""
    before = os.environ.get(_ALLOW_PICKLE)
    os.environ[_ALLOW_PICKLE] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW_PICKLE]
        else:
            os.environ[_ALLOW_PICKLE] = before


def _ensure_name(store: Store, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(name)
    except MlflowException as error:
        if error_code(error) == "INVALID_PARAMETER_VALUE":
            raise InputError(f"model name {name!r}: {one_line(error)}") from None
        if error_code(error) != "RESOURCE_ALREADY_EXISTS":
            raise


def _champion(store: Store, name: str) -> ModelVersion | None:
    for each in _versions(store, name):
        if CHAMPION in each.aliases:
            return each
    return None


def _compare(champion: ModelVersion | None, criterion: str, value: float, mode: str) -> tuple[bool, float | None, str]:
    """Return whether `value` makes a champion, the present champion's value, and why."""
    if math.isnan(value):
        previous = champion.metrics.get(criterion) if champion else None
        return False, previous, f"{criterion} is NaN"
    if champion is None:
        return True, None, "the first champion"
    previous = champion.metrics.get(criterion)
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
        aliases: Mapping[str, object] = store.client.get_registered_model(name).aliases
    except MlflowException as error:
        if error_code(error) in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return []
        raise
    quote = '"' if "'" in name else "'"
    found = []
    token: str | None = ""
    while token is not None:
        page = store.client.search_model_versions(f"name = {quote}{name}{quote}", page_token=token or None)
        for entry in page:
            named = sorted(alias for alias, version in aliases.items() if str(version) == str(entry.version))
            tags = entry.tags
            found.append(
                ModelVersion(
                    name=entry.name,
                    version=int(entry.version),
                    aliases=tuple(named),
                    metrics={
                        key.removeprefix(_METRIC): float(value)
                        for key, value in tags.items()
                        if key.startswith(_METRIC)
                    },
                    criterion=tags.get(_CRITERION),
                    run_id=entry.run_id or None,
                )
            )
        token = page.token or None
    return sorted(found, key=lambda each: -each.version)


def _listed(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(names) or "nothing yet"
