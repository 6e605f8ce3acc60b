"""Trained models that outlive the code that trained them.

A model is kept as the program that ``torch.export`` makes of it: no pickle (it is loaded without, to see that), and no
import of Concord or of the user's module to predict with it.
"""

import copy
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord.errors import RunFailedError
from concord.process_environment import environment_variables
from concord.tracking.client import failures, import_mlflow, one_line
from concord.tracking.registry import ModelVersion
from concord.tracking.store import Store

if TYPE_CHECKING:
    import torch

    from concord.environments.collection import RawRows

_TABLE_MODEL = Path(__file__).with_name("table_model.py")  # run by MLflow when it loads the model
# MLflow then refuses a model if it needed to unpickle anything, even a tensor in a ``.pt2`` archive.
_WITHOUT_PICKLE = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}


def log_model(
    store: Store, run_id: str, model: "torch.nn.Module", input_example: "torch.Tensor", raw: "RawRows | None" = None
) -> str:
    """Keep `model`, in evaluation mode on the CPU, with the run; return its URI, ``models:/m-…``.

    `input_example` is a batch, ``(rows, ...)``, of which two rows are stored (one row is used twice: a batch of one
    would export a program for batches of one). `model` itself is not changed. The kept program takes numbers of any
    type if the example has floating-point numbers, otherwise the example's type alone. With `raw` it takes rows of a
    table, and returns the probabilities of classes, or the number, by name.
    Raises RunFailedError with one line if ``torch.export`` cannot take it, fixes its batch size or keeps a part of it
    as a pickle; nothing is kept then.
    """
    import_mlflow()
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    client = store.client
    with failures(store.uri, f"keep the model of run {run_id}"), tempfile.TemporaryDirectory() as folder:
        run = client.get_run(run_id)
        path, description = Path(folder) / "model", Model(run_id=run_id)
        try:
            example = input_example.detach().cpu()
            if raw is None:
                signature = _save(model, example, path, description)
            else:
                network = Path(folder) / "network"
                _save(model, example, network, Model(run_id=run_id))
                signature = _save_table(raw, network, path, description)
        except Exception as error:  # export runs the user's code: anything may come out of it
            raise RunFailedError(f"torch.export cannot take this {type(model).__name__}: {one_line(error)}") from error
        # MLflow's log_model would do the rest through a process-wide address and active run.
        logged = client.create_logged_model(
            run.info.experiment_id,
            name="model",
            source_run_id=run_id,
            params=dict(run.data.params),
            tags={f"concord.{side}": _described(getattr(signature, side)) for side in ("inputs", "outputs")},
        )
        try:
            description.artifact_path = logged.artifact_location
            description.model_id = description.model_uuid = logged.model_id
            description.save(str(path / "MLmodel"))
            client.log_model_artifacts(logged.model_id, str(path))
            client.finalize_logged_model(logged.model_id, "READY")
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, 0)])
        except Exception:
            client.delete_logged_model(logged.model_id)
            raise
    return f"models:/{logged.model_id}"


def load_program(store: Store, version: ModelVersion) -> "torch.nn.Module":
    """Load the program of a version on the CPU, for predictions and gradients.

    Raises RunFailedError if its files cannot be read, or if anything in them would have to be unpickled.
    """
    import_mlflow()
    import mlflow.artifacts
    import mlflow.pytorch

    with failures(store.uri, f"load {version.uri}"), tempfile.TemporaryDirectory() as folder:
        source = store.client.get_model_version_download_uri(version.name, str(version.version))
        if source.startswith("models:/m-"):
            source = store.client.get_logged_model(source.removeprefix("models:/")).artifact_location
        path = mlflow.artifacts.download_artifacts(source, dst_path=folder, tracking_uri=store.uri)
        try:
            with environment_variables(_WITHOUT_PICKLE):
                program: torch.nn.Module = mlflow.pytorch.load_model(path, map_location="cpu")
        except Exception as error:  # any error of PyTorch's reader
            raise RunFailedError(f"{version.uri}: cannot be loaded ({one_line(error)})") from error
    return program


def _save(model: "torch.nn.Module", example: "torch.Tensor", path: Path, description: Any) -> Any:
    """Export `model` to the folder `path`, check its predictions, and return MLflow's signature of it."""
    import mlflow.pytorch
    import torch
    from mlflow.models import ModelSignature, infer_signature

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
    mlflow.pytorch.save_model(
        program,
        path,
        mlflow_model=description,
        signature=signature,
        input_example=rows.numpy(),
        # Given, because MLflow would find them out by loading the model in another process. Without "+cpu": the machine
        # that predicts may have another build.
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
    about.write_text(json.dumps({"encoder": raw.encoder.as_json(), "outputs": raw.outputs}))
    # The encoder says in one line what is wrong with a column; MLflow would print the table with it.
    inputs = [ColSpec(AnyType(), name, required=False) for name in raw.encoder.columns]
    outputs = [ColSpec(DataType.double, name) for name in raw.outputs]
    signature = ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))
    mlflow.pyfunc.save_model(
        path,
        python_model=str(_TABLE_MODEL),
        mlflow_model=description,
        artifacts={"network": str(network), "table": str(about)},
        code_paths=[table_encoder.__file__],
        signature=signature,
        input_example=raw.example,
        pip_requirements=[*_requirements(), f"pandas=={pandas.__version__}"],
    )
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
    """Type and shape of the one tensor that a signature has, or the names of its columns."""
    if not schema.is_tensor_spec():
        return ", ".join(schema.input_names())
    tensor = schema.inputs[0]
    return f"{tensor.type} {tuple(tensor.shape)}"
