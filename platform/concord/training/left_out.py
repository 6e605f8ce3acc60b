"""Predictions for an environment that is left out of training, as its run keeps them in a Parquet file.

Every evaluation predicts each of its examples; which evaluation counts is chosen later, by the other environments.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from concord.environments import Environments
from concord.training.checkpoint import verify_checkpoint
from concord.training.evaluation import Values

PREDICTIONS = "predictions.parquet"
CLUSTER = "cluster"  # its column of what several rows belong to, if the data name it
_STATE = "predictions.safetensors"  # in a checkpoint


class LeftOutPredictions:
    """The predictions of a run for the environment that it leaves out.

    Args:
        environments: of the run, with that environment as the only one for validation.
    """

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._targets: Tensor | None = None
        self._weights: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def add(self, step: int, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Take the outputs ``(examples, ...)`` of the evaluation after this many steps, targets and weights."""
        self._outputs[step], self._targets, self._weights = outputs, targets, weights

    def write_state(self, folder: Path) -> None:
        """Write the predictions so far into the folder of a checkpoint."""
        if self._targets is not None:
            outputs = {str(step): each.contiguous() for step, each in self._outputs.items()}
            weights = {} if self._weights is None else {"weights": self._weights.contiguous()}
            save_file({"targets": self._targets.contiguous(), **weights, **outputs}, folder / _STATE)

    def read_state(self, folder: Path) -> None:
        """Read the predictions so far (CheckpointError if a file is damaged)."""
        verify_checkpoint(folder)
        if (folder / _STATE).exists():
            found = load_file(folder / _STATE)
            self._targets, self._weights = found.pop("targets"), found.pop("weights", None)
            self._outputs = {int(step): each for step, each in sorted(found.items(), key=lambda item: int(item[0]))}

    def write(self, file: Path) -> None:
        """Write a row for each example and evaluation: step, row in the data, weight and cluster if it has one, target,
        prediction, probabilities.

        Several numbers an example have a column each, ``target_0`` and so on.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        (name,), outputs, targets = self._environments.validation, list(self._outputs.values()), self._targets
        assert targets is not None
        rows = self._environments.rows.get(name, np.arange(len(targets)))
        columns: dict[str, Any] = {
            "step": np.repeat(np.array(list(self._outputs)), len(targets)),
            "row": np.tile(rows, len(outputs)),
        }
        if self._weights is not None:
            columns["weight"] = np.tile(self._weights.numpy(), len(outputs))
        if name in self._environments.clusters:
            columns[CLUSTER] = np.tile(self._environments.clusters[name], len(outputs))
        every = torch.cat([targets] * len(outputs))
        pq.write_table(pa.table(columns | self.columns(torch.cat(outputs), every)), file)

    def columns(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Target, prediction and probabilities of outputs ``(examples, ...)``, in the data's own terms."""
        if outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point() and outputs.shape[1] > 1:
            names = self._environments.classes or tuple(map(str, range(outputs.shape[1])))
            probabilities = outputs.softmax(1).numpy()
            found = {"target": _named(targets, names), "prediction": _named(outputs.argmax(1), names)}
            return found | {f"probability_{name}": probabilities[:, at] for at, name in enumerate(names)}
        scale = self._environments.target_scale
        pairs = {"target": targets.double(), "prediction": outputs.double()}
        columns: dict[str, Any] = {}
        for kind, values in pairs.items():
            flat = values.view(len(values), -1).numpy()
            if scale is not None and not (scale.log and kind == "target"):  # counts are as they are
                flat = scale.in_units(flat)
            ends = [""] if flat.shape[1] == 1 else [f"_{at}" for at in range(flat.shape[1])]
            columns |= {f"{kind}{end}": flat[:, at] for at, end in enumerate(ends)}
        return columns


def _named(codes: Tensor, names: Sequence[str]) -> Values:
    found: Values = np.array(names, dtype=object)[codes.numpy()]
    return found
