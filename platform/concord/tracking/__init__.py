"""Runs, metrics and models in MLflow: the only package that imports it, and not before it is needed.

`Store` finds a store and keeps runs; `MetricLog` brings a training loop's metrics there without ever holding it up;
`log_model` and `register` keep models and the champion among them.
"""

from concord.redaction import redact
from concord.tracking.child_runs import ChildRuns
from concord.tracking.exported_model import load_program, log_model
from concord.tracking.metric_log import MetricLog
from concord.tracking.registry import ModelVersion, Registered, add_lineage, models, promote, register, show
from concord.tracking.store import Run, Store, TrackedData

__all__ = [
    "ChildRuns",
    "MetricLog",
    "ModelVersion",
    "Registered",
    "Run",
    "Store",
    "TrackedData",
    "add_lineage",
    "load_program",
    "log_model",
    "models",
    "promote",
    "redact",
    "register",
    "show",
]
