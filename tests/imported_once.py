"""Imports and computes once what every command needs; the processes of commands are forked from the one that did."""

import sys

import torch

from concord.tracking.client import import_mlflow

import_mlflow()
sys.modules["pytorch_lightning"] = None  # type: ignore[assignment]  # as in conftest.py
import alembic.command  # noqa: E402, F401
import matplotlib.backends.backend_agg  # noqa: E402, F401
import mlflow.pytorch  # noqa: E402
import mlflow.store.tracking.sqlalchemy_store  # noqa: E402, F401
from mlflow.utils.requirements_utils import warn_dependency_requirement_mismatches  # noqa: E402

import concord.cli.running  # noqa: E402, F401

# The first export of a process imports hundreds of modules.
torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),))
# MLflow lists the modules of all installed packages, once in a process.
warn_dependency_requirement_mismatches(["torch"])
