"""Imports MLflow as Concord does, for the processes that are forked."""

from concord.tracking.client import import_mlflow

import_mlflow()
