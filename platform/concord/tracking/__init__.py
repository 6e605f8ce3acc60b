"""Runs, metrics and models in MLflow: the only package that imports it, lazily.

`Store` finds a store and keeps runs; `Mirror` sends a record's events there without delaying the work;
`log_model` and `register` keep models and the champion among them.
"""

from concord.tracking.exported_model import ExportError, load_predictor, load_program, log_model
from concord.tracking.mirror import Mirror
from concord.tracking.registry import ModelVersion, Registered, models, promote, register, show
from concord.tracking.store import Store, TrackedRun

__all__ = [
    "ExportError",
    "Mirror",
    "ModelVersion",
    "Registered",
    "Store",
    "TrackedRun",
    "load_predictor",
    "load_program",
    "log_model",
    "models",
    "promote",
    "register",
    "show",
]
