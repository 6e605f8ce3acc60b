"""A registered model of a table: takes raw rows, and returns probabilities by class.

MLflow runs this file when it loads the model, with ``table_encoder.py`` beside it and without Concord.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd

try:
    from table_encoder import TableEncoder
except ModuleNotFoundError:  # when Concord saves the model
    from concord.environments.table_encoder import TableEncoder


class TableModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Encodes rows and calls the exported network."""

    def load_context(self, context: Any) -> None:
        """Read encoder and network."""
        about = json.loads(Path(context.artifacts["table"]).read_text())
        self.encoder, self.outputs = TableEncoder.read(about["encoder"]), about["outputs"]
        mean, deviation, log = about["target"] or (0.0, 1.0, False)
        self.mean, self.deviation, self.log = float(mean), float(deviation), bool(log)
        self.network = mlflow.pyfunc.load_model(context.artifacts["network"], model_config={"device": "cpu"})

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:  # noqa: ARG002
        """Probabilities by class, or the predicted number; of counts the expected one.

        A missing column, or one of another type, is an MlflowException of one line, which a server returns.
        """
        try:
            rows = self.encoder.encode(model_input)
        except ValueError as error:
            raise mlflow.exceptions.MlflowException.invalid_parameter_value(str(error)) from None
        for column, levels in self.encoder.unknown(model_input).items():
            warnings.warn(f"column {column}: unknown or rare in training: {', '.join(levels)}", stacklevel=2)
        answer = np.asarray(self.network.predict(rows), dtype=np.float64)
        if len(self.outputs) > 1:
            answer = np.exp(answer - answer.max(1, keepdims=True))
            answer /= answer.sum(1, keepdims=True)
        else:
            answer = np.exp(answer) if self.log else self.mean + self.deviation * answer
        return pd.DataFrame(answer, columns=self.outputs, index=model_input.index)


mlflow.models.set_model(TableModel())
