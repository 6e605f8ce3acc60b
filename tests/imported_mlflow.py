"""Imports MLflow as Concord does, and its store in a file, for the processes that are forked."""

from concord.tracking.client import import_mlflow

import_mlflow()
import mlflow.store.tracking.sqlalchemy_store  # noqa: E402, F401
