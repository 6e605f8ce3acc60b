"""A registered model of named tensors: takes a dictionary of arrays, ``(examples, ...)`` each.

MLflow runs this file when it loads the model, without Concord.
"""

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch


class TensorsModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Calls the exported network."""

    def load_context(self, context: Any) -> None:
        """Read the network and the names of its inputs and outputs."""
        about = json.loads(Path(context.artifacts["names"]).read_text())
        self.inputs, self.outputs, self.named = about["inputs"], about["outputs"], about["named"]
        self.network = mlflow.pytorch.load_model(context.artifacts["network"], map_location="cpu")

    # A dictionary of arrays comes. MLflow has no type hint for it, and warns whenever the model is loaded without one.
    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> Any:  # type: ignore[type-arg]  # noqa: ARG002
        """An array, or arrays by name, as the model gives them."""
        tensors = [torch.from_numpy(np.ascontiguousarray(model_input[name])) for name in self.inputs]
        with torch.no_grad():
            answers = [each.numpy() for each in self.network(*tensors)]
        return dict(zip(self.outputs, answers, strict=True)) if self.named else answers[0]


mlflow.models.set_model(TensorsModel())
