"""Train a model on what its environments agree on.

The public interface: ``train``, ``tune``, ``compare``, ``load`` and ``runs``, and what a job of one's own is made of.
A name is imported when it is used, so that ``import concord`` imports neither PyTorch nor Ray nor MLflow.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord.lazy_names import lazy_names

if TYPE_CHECKING:
    from concord.environments import Environments
    from concord.errors import InputError, RunFailedError, StoppedError, UnfinishedError
    from concord.interface.commands import compare, runs, train, tune
    from concord.interface.results import load
    from concord.space import Choice, Integers, LogUniform, OneOf, Uniform
    from concord.training.callback import Callback
    from concord.training.declared_measures import Measure
    from concord.training.job import Job
    from concord.training.metric_writers import TensorBoard, WeightsAndBiases
    from concord.training.options import TrainConfig

__all__ = [
    "Callback",
    "Choice",
    "Environments",
    "InputError",
    "Integers",
    "Job",
    "LogUniform",
    "Measure",
    "OneOf",
    "RunFailedError",
    "StoppedError",
    "TensorBoard",
    "TrainConfig",
    "UnfinishedError",
    "Uniform",
    "WeightsAndBiases",
    "compare",
    "load",
    "runs",
    "train",
    "tune",
]

_imported = lazy_names(
    __name__,
    {
        "concord.interface.commands": ("compare", "runs", "train", "tune"),
        "concord.interface.results": ("load",),
        "concord.training.callback": ("Callback",),
        "concord.environments": ("Environments",),
        "concord.training.job": ("Job",),
        "concord.training.declared_measures": ("Measure",),
        "concord.training.metric_writers": ("TensorBoard", "WeightsAndBiases"),
        "concord.training.options": ("TrainConfig",),
        "concord.space": ("Choice", "Integers", "LogUniform", "OneOf", "Uniform"),
        "concord.errors": ("InputError", "RunFailedError", "StoppedError", "UnfinishedError"),
    },
)
# Written when the package is sent to a cluster, which may have another version or none.
_SENT = Path(__file__).parent / "VERSION"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    return _imported(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])


def _version() -> str:
    """The version, computed on demand: it takes longer than the rest of ``concord --help``."""
    from importlib.metadata import PackageNotFoundError, version

    from concord.extras import DISTRIBUTION

    try:
        return _SENT.read_text(encoding="utf-8") if _SENT.exists() else version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
