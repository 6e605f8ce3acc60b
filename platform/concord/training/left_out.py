"""Predictions for environments that are left out of training, as their run keeps them in a Parquet file.

Every evaluation predicts each of its examples; which evaluation counts is chosen later, by the other environments.
"""

import math
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
PROBABILITY = "probability_"  # begins the column of a class
CUTOFF = "cutoff"  # its column of the probability from which recall and specificity predict the second of two classes
USUAL_CUTOFF = 0.5  # has no column
_STATE = "predictions.safetensors"  # in a checkpoint
_TARGETS, _WEIGHTS = "targets", "weights"


class LeftOutPredictions:
    """The predictions of a run for the environments that it leaves out.

    Args:
        environments: of the run, with those environments as the only ones for validation.
        cutoff: of two classes, the probability from which the run's recall and specificity predict the second; None if
            they are means over the classes.
    """

    def __init__(self, environments: Environments, cutoff: float | None = USUAL_CUTOFF) -> None:
        self._environments = environments
        self._cutoff = math.nan if cutoff is None else cutoff
        self._targets: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._outputs: dict[int, dict[str, Tensor]] = {}

    def add(self, step: int, name: str, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Take the outputs ``(examples, ...)`` of an environment after this many steps, targets and weights."""
        self._outputs.setdefault(step, {})[name], self._targets[name] = outputs, targets
        if weights is not None:
            self._weights[name] = weights

    def write_state(self, folder: Path) -> None:
        """Write the predictions so far into the folder of a checkpoint."""
        outputs = {str(step): found for step, found in self._outputs.items()}
        kinds = {_TARGETS: self._targets, _WEIGHTS: self._weights, **outputs}
        tensors = {
            kind if place == 0 else f"{kind}/{place}": found[name].contiguous()
            for kind, found in kinds.items()
            for place, name in enumerate(self._environments.validation)
            if name in found
        }
        if tensors:
            save_file(tensors, folder / _STATE)

    def read_state(self, folder: Path) -> None:
        """Read the predictions so far (CheckpointError if a file is damaged)."""
        verify_checkpoint(folder)
        if (folder / _STATE).exists():
            kinds: dict[str, dict[str, Tensor]] = {}
            for key, tensor in load_file(folder / _STATE).items():
                kind, _, place = key.partition("/")
                kinds.setdefault(kind, {})[self._environments.validation[int(place or 0)]] = tensor
            self._targets, self._weights = kinds.pop(_TARGETS), kinds.pop(_WEIGHTS, {})
            self._outputs = {step: kinds[str(step)] for step in sorted(map(int, kinds))}

    def write(self, file: Path) -> None:
        """Write a row for each example and evaluation: step, environment, row in the data, weight and cluster if it has
        one, target, prediction, probabilities.

        Several numbers an example have a column each, ``target_0`` and so on. A cutoff other than 0.5 has a column, NaN
        without a cutoff.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        names, steps = self._environments.validation, list(self._outputs)
        sizes = [len(self._targets[name]) for name in names]
        rows = [self._environments.rows.get(name, np.arange(size)) for name, size in zip(names, sizes, strict=True)]
        columns: dict[str, Any] = {
            "step": np.repeat(np.array(steps), sum(sizes)),
            "environment": np.tile(np.repeat(np.array(names, dtype=object), sizes), len(steps)),
            "row": np.tile(np.concatenate(rows), len(steps)),
        }
        if self._weights:
            columns["weight"] = np.tile(torch.cat([self._weights[name] for name in names]).numpy(), len(steps))
        if clusters := [self._environments.clusters[name] for name in names if name in self._environments.clusters]:
            columns[CLUSTER] = np.tile(np.concatenate(clusters), len(steps))
        outputs = torch.cat([self._outputs[step][name] for step in steps for name in names])
        targets = torch.cat([self._targets[name] for name in names] * len(steps))
        if self._cutoff != USUAL_CUTOFF:
            columns[CUTOFF] = np.full(len(targets), self._cutoff)
        pq.write_table(pa.table(columns | self.columns(outputs, targets)), file)

    def columns(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Target, prediction and probabilities of outputs ``(examples, ...)``, in the data's own terms."""
        if outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point() and outputs.shape[1] > 1:
            names = self._environments.classes or tuple(map(str, range(outputs.shape[1])))
            probabilities = outputs.softmax(1).numpy()
            found = {"target": _named(targets, names), "prediction": _named(outputs.argmax(1), names)}
            return found | {f"{PROBABILITY}{name}": probabilities[:, at] for at, name in enumerate(names)}
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
