"""The checkpoint of a run: model, optimizer, objective and position in the data. No pickle is read.

``checksums.json`` is written last and holds the SHA-256 of the other files. Every reader checks them: 0.1 s for 100 MB.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from concord.errors import CheckpointError, InputError, first_line
from concord.storage import disk_errors_in_one_line, file_checksum
from concord.training.optimization import Optimization

MODEL, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.pt", "progress.json"
TRAINED = "trained.safetensors"  # the weights that are trained, where the model is their average
MOMENTUM = "environment_momentum.safetensors"
CHECKSUMS = "checksums.json"  # SHA-256 of every other file, by name; written last
# Metrics of a resumed run.
RESUMED_EPOCH, RESUMED_WORKERS, RESUMED_SECONDS = "resumed/epoch", "resumed/workers", "resumed/seconds"


@dataclasses.dataclass
class Progress:
    """How far a run has come.

    Attributes:
        epoch: epochs done; training continues with the first batch of epoch ``epoch``.
        skipped: how often an environment was left out of a step.
        averaged: the number of weights in the average that is the model.
        model_evaluations: the number in training, if the risk counts them.
        ended: an option ended the run before its last epoch.
        written: the time of writing, in seconds since 1970.
    """

    epoch: int = 0
    skipped: int = 0
    averaged: int = 0
    model_evaluations: float = 0.0
    ended: bool = False
    written: float = 0.0

    def resumed(self, workers: int) -> dict[str, float]:
        """The metrics of a resume from here: the epoch, the number of workers, and the seconds since the checkpoint."""
        where = {RESUMED_EPOCH: float(self.epoch), RESUMED_WORKERS: float(workers)}
        return where | ({RESUMED_SECONDS: time.time() - self.written} if self.written else {})


def write_checkpoint(
    folder: Path,
    model: nn.Module,
    optimization: Optimization,
    progress: Progress,
    momentum: Mapping[str, Tensor] | None = None,
    trained: nn.Module | None = None,
) -> None:
    """Write the files of a checkpoint into an existing folder: three, one for environments' ``momentum``, and one for
    the ``trained`` weights of which the model is an average."""
    for name, part in {MODEL: model, TRAINED: trained}.items():
        if part is not None:
            # Clones, since safetensors refuses tensors that share memory, as tied weights do.
            weights = {name: value.detach().cpu().clone().contiguous() for name, value in part.state_dict().items()}
            _save(weights, folder / name)
    if momentum:
        _save({name: value.cpu() for name, value in momentum.items()}, folder / MOMENTUM)
    with (folder / OPTIMIZER).open("wb") as file:  # opened here: PyTorch hides the error of a full disk
        torch.save(optimization.state_dict(), file)
    (folder / PROGRESS).write_text(json.dumps(dataclasses.asdict(progress) | {"written": time.time()}))
    write_checksums(folder)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    with disk_errors_in_one_line(file):  # safetensors' own error names no file
        save_file(tensors, file)


def write_checksums(folder: Path) -> None:
    """Write the checksums of a checkpoint's files; call it last."""
    checksums = {path.name: file_checksum(path) for path in folder.iterdir() if path.name != CHECKSUMS}
    (folder / CHECKSUMS).write_text(json.dumps(checksums))


def verify_checkpoint(folder: Path) -> None:
    """Check that all files of a checkpoint exist and are undamaged (CheckpointError)."""
    _verify(folder, *_read_json(folder, CHECKSUMS))


def read_checkpoint(folder: Path, model: nn.Module, optimization: Optimization) -> Progress:
    """Load a checkpoint into model and optimization.

    A checkpoint of another model or optimizer is an InputError, a damaged one a CheckpointError.
    """
    read_weights(folder, model)
    _verify(folder, OPTIMIZER)
    progress = read_progress(folder)
    try:
        states: dict[str, Any] = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch's own message advises an unsafe load
        raise CheckpointError(
            f"checkpoint {folder}: {OPTIMIZER} holds objects that are not an optimizer's state; it was not read"
        ) from error
    try:
        optimization.load_state_dict(states)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        problem = f"{OPTIMIZER} is of another optimizer or objective ({first_line(error)})"
        raise InputError(f"checkpoint {folder}: {problem}") from error
    return progress


def read_progress(folder: Path) -> Progress:
    """How far the run of a checkpoint has come (CheckpointError if that is damaged)."""
    _verify(folder, PROGRESS)
    known = {each.name for each in dataclasses.fields(Progress)}  # earlier versions wrote more
    return Progress(**{name: value for name, value in _read_json(folder, PROGRESS).items() if name in known})


def read_weights(folder: Path, model: nn.Module, file: str = MODEL) -> None:
    """Load a checkpoint's weights into the model."""
    _verify(folder, file)
    weights = load_file(folder / file)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if expected != found:
        name = next(name for name in {**expected, **found} if expected.get(name) != found.get(name))
        raise InputError(
            f"checkpoint {folder}: of another model; {name} is {found.get(name, 'missing')} in it "
            f"and {expected.get(name, 'missing')} in this model"
        )
    model.load_state_dict(weights)


def read_momentum(folder: Path, environments: Sequence[str]) -> dict[str, Tensor]:
    """Read the gradient averages of these environments alone from a checkpoint."""
    if MOMENTUM not in _read_json(folder, CHECKSUMS):
        raise InputError(f"checkpoint {folder}: of a run without --environment-momentum; it has no {MOMENTUM}")
    _verify(folder, MOMENTUM)
    with safe_open(folder / MOMENTUM, framework="pt") as file:
        known = set(file.keys())
        for name in environments:
            if f"average/{name}" not in known:
                raise InputError(f"checkpoint {folder}: {MOMENTUM} has no environment {name}")
        wanted = [f"{what}/{name}" for name in environments for what in ("average", "steps")]
        return {each: file.get_tensor(each) for each in wanted}


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text())
        if not isinstance(content, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {name} cannot be read ({first_line(error)})") from error
    return content


def _verify(folder: Path, *names: str) -> None:
    expected = _read_json(folder, CHECKSUMS)
    for name in names:
        try:
            found = file_checksum(folder / name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder}: {name} cannot be read ({error.strerror})") from error
        if found != expected.get(name):
            raise CheckpointError(
                f"checkpoint {folder}: {name} is damaged (SHA-256 {found}, expected {expected.get(name)})"
            )
