"""Trained models that outlive the code that trained them.

A model is kept as the program that ``torch.export`` makes of it. It holds no pickle, which loading it verifies,
and predictions import neither Concord nor the user's module.
"""

import contextlib
import copy
import importlib.metadata
import inspect
import json
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord.errors import RunFailedError
from concord.extras import install_command
from concord.process_environment import environment_variables
from concord.tracking.client import failures, import_mlflow, one_line
from concord.tracking.registry import ModelVersion
from concord.tracking.store import KEY, Store

if TYPE_CHECKING:
    import torch

    from concord.environments.collection import RawRows
    from concord.tracking.model_call import ModelCall

# Files that MLflow runs when it loads a model.
_TABLE_MODEL, _TENSORS_MODEL = (Path(__file__).with_name(name) for name in ("table_model.py", "tensors_model.py"))
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
# MLflow then refuses a model if it needed to unpickle anything, even a tensor in a ``.pt2`` archive.
_WITHOUT_PICKLE = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}


class ExportError(RunFailedError):
    """``torch.export`` cannot take a model, or MLflow cannot keep or load one here."""


def _mlflow_pytorch() -> Any:
    """MLflow's module for PyTorch; ExportError if it cannot be imported.

    It imports Lightning where that is installed, and Lightning imports torchvision, whose operators are compiled for
    one version of PyTorch.
    """
    import_mlflow()
    try:
        import mlflow.pytorch
    except Exception as error:  # a package's own code runs
        fits = f": {install_command('images', replaced='torchvision')}" if "torchvision" in str(error) else ""
        raise ExportError(f"mlflow.pytorch cannot be imported ({one_line(error)}){fits}") from error
    return mlflow.pytorch


def log_model(
    store: Store,
    run_id: str,
    model: "torch.nn.Module",
    input_example: "torch.Tensor | ModelCall",
    raw: "RawRows | None" = None,
    classes: Sequence[str] | None = None,
    name: str = "model",
    key: str | None = None,
) -> str:
    """Keep `model`, in evaluation mode on the CPU, with the run; return its URI, ``models:/m-…``.

    `input_example` is a batch, ``(rows, ...)``, of which two rows are stored (one row is used twice: a batch of one
    would export a program for batches of one). `model` itself is not changed. If the example is floating
    point, the kept program takes any numeric type, otherwise only the example's. If the example is a call with
    named tensors, the program takes a dictionary of those that its outputs depend on. With `raw` it takes rows of a
    table, and returns the probabilities of classes, or the number, by name. `classes`, the names of other classes in
    the order of the outputs, are kept in the model's metadata, and name its outputs. `name` is shown in MLflow. `key`
    is of this model alone; what an earlier call with it left is completed.
    Raises ExportError with one line if ``torch.export`` cannot take it, fixes its batch size or keeps a part of it
    as a pickle, or if ``mlflow.pytorch`` cannot be imported; nothing is kept then.
    """
    _mlflow_pytorch()
    import torch
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    client = store.client
    with failures(store.uri, f"keep the model of run {run_id}"), tempfile.TemporaryDirectory() as folder:
        run = client.get_run(run_id)
        metadata = None if classes is None else {"classes": list(classes)}
        path, description = Path(folder) / "model", Model(run_id=run_id, metadata=metadata)
        try:
            network = Path(folder) / "network"
            if not isinstance(input_example, torch.Tensor):
                signature = _save_tensors(model, input_example, network, path, description)
            elif raw is None:
                signature = _save(model, input_example.detach().cpu(), path, description, classes)
            else:
                if raw.network is not None:
                    model, input_example = raw.network(model), torch.from_numpy(raw.encoder.encode(raw.example))
                inner = _save(model, input_example.detach().cpu(), network, Model(run_id=run_id))
                found = inner.outputs.inputs[0].shape[1:]
                if found != (len(raw.outputs),):
                    raise ExportError(
                        f"this {type(model).__name__} gives {found} for each row, and the table needs "
                        f"({len(raw.outputs)},), for {', '.join(raw.outputs)}"
                    )
                signature = _save_table(raw, network, path, description)
        except ExportError:
            raise
        except Exception as error:  # export runs the user's code: anything may come out of it
            raise ExportError(f"torch.export cannot take this {type(model).__name__}: {one_line(error)}") from error
        # MLflow's log_model would do the rest through a process-wide address and active run.
        name = re.sub(r"[/:.%\"']", "-", name)  # as MLflow accepts it
        experiment, unsure, key = run.info.experiment_id, key is not None, key or uuid.uuid4().hex
        described = {f"concord.{side}": _described(getattr(signature, side)) for side in ("inputs", "outputs")}
        about = {"source_run_id": run_id, "params": dict(run.data.params), "tags": {KEY: key, **described}}

        def find_model() -> Any:
            return next(iter(client.search_logged_models([experiment], f"tags.`{KEY}` = '{key}'")), None)

        logged = store.create(lambda: client.create_logged_model(experiment, name, **about), find_model, unsure)
        try:
            description.artifact_path = logged.artifact_location
            description.model_id = description.model_uuid = logged.model_id
            description.save(str(path / "MLmodel"))
            client.log_model_artifacts(logged.model_id, str(path))
            client.finalize_logged_model(logged.model_id, "READY")
            output = LoggedModelOutput(logged.model_id, 0)

            def find_output() -> bool | None:
                outputs = client.get_run(run_id).outputs
                known = outputs.model_outputs if outputs is not None else []
                return any(each.model_id == output.model_id for each in known) or None

            store.create(lambda: client.log_outputs(run_id, [output]), find_output, unsure)
        except Exception:
            with contextlib.suppress(Exception):  # a server that is away has it still, under its key
                client.delete_logged_model(logged.model_id)
            raise
    return f"models:/{logged.model_id}"


def load_program(store: Store, version: ModelVersion) -> "torch.nn.Module":
    """Load the program of a version on the CPU, for predictions and gradients.

    Raises RunFailedError if its files cannot be read, if anything in them would have to be unpickled, or if they have
    modules: MLflow would put these before all others, and a later import would run them.
    """
    pytorch = _mlflow_pytorch()
    from mlflow.models import Model

    with failures(store.uri, f"load {version.uri}"), tempfile.TemporaryDirectory() as folder:
        path = _download(store, f"models:/{version.name}/{version.version}", folder)
        try:
            network = Path(path) / "artifacts" / "network"  # of a table's model
            if network.exists():
                path = str(network)
            if code := Model.load(path).flavors[pytorch.FLAVOR_NAME].get("code"):
                raise RunFailedError(f"its folder {code} has modules, and a program of Concord has none")
            with environment_variables(_WITHOUT_PICKLE):
                program: torch.nn.Module = pytorch.load_model(path, map_location="cpu")
        except Exception as error:  # any error of PyTorch's reader
            raise RunFailedError(f"{version.uri}: cannot be loaded ({one_line(error)})") from error
    return program


def load_predictor(store: Store, uri: str) -> Any:
    """Load a model of this store by its URI, ``models:/NAME/VERSION`` or ``models:/m-…``, as MLflow serves it.

    Its ``predict`` takes a frame of a table's columns, or arrays. A model that needs to unpickle anything is refused
    (RunFailedError).
    """
    _mlflow_pytorch()
    import mlflow.pyfunc

    with failures(store.uri, f"load {uri}"), tempfile.TemporaryDirectory() as folder:
        path = _download(store, uri, folder)
        try:
            with environment_variables(_WITHOUT_PICKLE):
                return mlflow.pyfunc.load_model(path)
        except Exception as error:  # any error of PyTorch's reader
            raise RunFailedError(f"{uri}: cannot be loaded ({one_line(error)})") from error


def _download(store: Store, uri: str, folder: str) -> str:
    """Download the files of a model into this folder; return their folder in it."""
    import mlflow.artifacts

    source = uri
    if not uri.startswith("models:/m-"):
        name, _, version = uri.removeprefix("models:/").partition("/")
        source = store.client.get_model_version_download_uri(name, version)
    if source.startswith("models:/m-"):
        source = store.client.get_logged_model(source.removeprefix("models:/")).artifact_location
    path: str = mlflow.artifacts.download_artifacts(source, dst_path=folder, tracking_uri=store.uri)
    return path


def _save(
    model: "torch.nn.Module",
    example: "torch.Tensor",
    path: Path,
    description: Any,
    classes: Sequence[str] | None = None,
) -> Any:
    """Export `model` to the folder `path`, check its predictions, and return MLflow's signature of it.

    Outputs that are as many as ``classes`` have their names.
    """
    import mlflow.pytorch
    import torch
    from mlflow.models import ModelSignature, infer_signature
    from mlflow.types import ColSpec, DataType, Schema

    program = copy.deepcopy(model).cpu().eval()
    rows = example[[0, min(1, len(example) - 1)]].contiguous()
    if rows.is_floating_point():
        # Not inputs.to(dtype): the exporter writes down the type of the example with it, and refuses all others.
        program.register_forward_pre_hook(
            lambda _, inputs: (torch.empty_like(inputs[0], dtype=rows.dtype).copy_(inputs[0]),)
        )
    with torch.no_grad():
        answer = program(rows)
    if not isinstance(answer, torch.Tensor) or answer.shape[:1] != rows.shape[:1]:
        raise TypeError("its answer to a batch is not one tensor with a row for each example")
    signature = infer_signature(rows.numpy(), answer.numpy())
    if classes is not None and answer.shape[1:] == (len(classes),):
        signature.outputs = Schema([ColSpec(DataType.float, name) for name in classes])
    mlflow.pytorch.save_model(
        program,
        path,
        mlflow_model=description,
        signature=signature,
        input_example=rows.numpy(),
        # MLflow would detect them by loading the model in another process. Without "+cpu": the machine that predicts
        # may have another build.
        pip_requirements=_requirements(),
        serialization_format="pt2",
    )
    if rows.is_floating_point():
        # MLflow would refuse any other type than the signature's, such as float64, before it asks the program.
        description.signature = ModelSignature(outputs=signature.outputs)
        description.save(str(path / "MLmodel"))
    _check_predictions(path, rows, answer)
    return signature


def _save_table(raw: "RawRows", network: Path, path: Path, description: Any) -> Any:
    """Save the exported network with the encoder of rows before it; gives MLflow's signature of both."""
    import mlflow.pyfunc
    import pandas
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    from concord.environments import table_encoder

    about = network.parent / "table.json"
    about.write_text(json.dumps({"encoder": raw.encoder.as_json(), "outputs": raw.outputs, "target": raw.target_scale}))
    # The encoder says in one line what is wrong with a column; MLflow would print the table with it.
    inputs = [ColSpec(AnyType(), name, required=False) for name in raw.encoder.columns]
    outputs = [ColSpec(DataType.double, name) for name in raw.outputs]
    tokenizers = [] if raw.encoder.tokens is None else [f"tokenizers=={importlib.metadata.version('tokenizers')}"]
    signature = ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))
    mlflow.pyfunc.save_model(
        path,
        python_model=str(_TABLE_MODEL),
        mlflow_model=description,
        artifacts={"network": str(network), "table": str(about)},
        code_paths=[table_encoder.__file__],
        signature=signature,
        input_example=raw.example,
        pip_requirements=[*_requirements(), f"pandas=={pandas.__version__}", *tokenizers],
    )
    return signature


def _save_tensors(model: "torch.nn.Module", call: "ModelCall", network: Path, path: Path, description: Any) -> Any:
    """Export a call with named tensors, check its predictions, and return MLflow's signature of it."""
    import mlflow.pyfunc
    import mlflow.pytorch
    import numpy
    import torch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    from concord.tracking.model_call import OUTPUT

    class Program(torch.nn.Module):
        """The model as a function of tensors in the order of their names."""

        def __init__(self, model: torch.nn.Module, inputs: list[str], outputs: list[str]) -> None:
            super().__init__()
            self.model = model

            def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                answer = call(self.model, dict(zip(inputs, tensors, strict=True)))
                return tuple(answer[name] for name in outputs)

            # The exporter binds dynamic shapes by parameter, so that a variable number of them has no shapes.
            places = [inspect.Parameter(f"tensor_{place}", _POSITIONAL) for place in range(len(inputs))]
            forward.__signature__ = inspect.Signature(places)  # type: ignore[attr-defined]
            self.forward = forward

    def specs(tensors: Mapping[str, torch.Tensor]) -> Schema:
        named = tensors.keys() != {OUTPUT}
        return Schema(
            [
                TensorSpec(each.numpy().dtype, (-1, *each.shape[1:]), name if named else None)
                for name, each in tensors.items()
            ]
        )

    network_copy = copy.deepcopy(model).cpu().eval()
    last = len(next(iter(call.inputs.values()))) - 1
    two, three = call.rows([0, min(1, last)]), call.rows([0, min(1, last), min(2, last)])
    with torch.no_grad():
        answers, more = (each(network_copy, each.inputs) for each in (two, three))
    outputs = {name: each for name, each in answers.items() if (len(each), len(more[name])) == (2, 3)}
    if not outputs:
        raise TypeError("its answer to a batch has no tensor with a row for each example")
    # Inputs that these outputs do not depend on, such as the labels, are not asked for.
    exported = torch.export.export(Program(network_copy, list(two.inputs), list(outputs)), tuple(two.inputs.values()))
    exported.graph.eliminate_dead_code()
    used = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
    names = zip(two.inputs, exported.graph_signature.user_inputs, strict=True)
    inputs = {name: two.inputs[name] for name, place in names if place in used}
    signature = ModelSignature(inputs=specs(inputs), outputs=specs(outputs))
    mlflow.pytorch.save_model(
        Program(network_copy, list(inputs), list(outputs)),
        network,
        signature=signature,
        input_example=tuple(each.numpy() for each in inputs.values()),
        pip_requirements=_requirements(),
        serialization_format="pt2",
    )
    about = network.parent / "names.json"
    about.write_text(json.dumps({"inputs": [*inputs], "outputs": [*outputs], "named": outputs.keys() != {OUTPUT}}))
    mlflow.pyfunc.save_model(
        path,
        python_model=str(_TENSORS_MODEL),
        mlflow_model=description,
        artifacts={"network": str(network), "names": str(about)},
        signature=signature,
        input_example={name: each.numpy() for name, each in inputs.items()},
        pip_requirements=_requirements(),
    )
    with environment_variables(_WITHOUT_PICKLE):
        predict = mlflow.pyfunc.load_model(str(path)).predict
    predicted = predict({name: three.inputs[name].numpy() for name in inputs})
    for name in outputs:
        answer = predicted if outputs.keys() == {OUTPUT} else predicted[name]
        if not numpy.allclose(answer, more[name], rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError("the exported program answers otherwise than the model")
    return signature


def _check_predictions(path: Path, rows: "torch.Tensor", answer: "torch.Tensor") -> None:
    """Predict with the saved program, as a user will: the exporter may have fixed the batch size silently."""
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


def _requirements() -> list[str]:
    import numpy
    import torch

    return [f"torch=={torch.__version__.split('+')[0]}", f"numpy=={numpy.__version__}"]


def _described(schema: Any) -> str:
    """Type and shape of every tensor that a signature has, with their names, or the names of its columns."""
    if not schema.is_tensor_spec():
        return ", ".join(schema.input_names())
    named = (f"{each.name} " if each.name else "" for each in schema.inputs)
    return ", ".join(f"{name}{each.type} {tuple(each.shape)}" for name, each in zip(named, schema.inputs, strict=True))
