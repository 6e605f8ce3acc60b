"""Heart disease in four hospitals, of which one is the test.

The UCI repository's Heart Disease data (doi:10.24432/C52P4X, CC BY 4.0; Janosi, Steinbrunn, Pfisterer, Detrano): 303
patients of Cleveland, 294 of Hungary, 123 of Switzerland, 200 of Long Beach.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from concord.errors import InputError
from concord.models.table_network_options import TableNetworkOptions
from concord.options import group
from concord.training import Job, TrainConfig
from concord.training.baseline import TABLE_BASELINES, fit_table
from concord.training.declared_measures import EnvironmentEvaluation

# With PyTorch and pandas, which take seconds: help and a wrong option do without.
if TYPE_CHECKING:
    import pandas
    from torch import Tensor, nn

    from concord.environments.table import TableEnvironments

HOSPITALS = {"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}
COLUMNS = [
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal",
    "num",
]  # fmt: skip
RESAMPLES = 1000  # of the bootstrap
HOME = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"
NAMES = {
    "cp": {1: "typical angina", 2: "atypical angina", 3: "other pain", 4: "no pain"},
    "restecg": {0: "normal", 1: "abnormal wave", 2: "hypertrophy"},
    "slope": {1: "up", 2: "flat", 3: "down"},
    "thal": {3: "normal", 6: "fixed defect", 7: "reversible defect"},
}


@dataclass(frozen=True, kw_only=True)
class HeartDiseaseConfig(TrainConfig):
    """Patients of three hospitals, and of a fourth for the test."""

    # fmt: off
    test_hospital: Literal["cleveland", "hungarian", "switzerland", "va", "none"] = "va"
    """Hospital to test on; none trains on all four."""
    network_options: TableNetworkOptions = group(TableNetworkOptions, network="linear", hidden_units=16)
    # fmt: on


@functools.lru_cache(maxsize=1)
def patients(folder: Path | None) -> "pandas.DataFrame":
    """All 920 patients with their hospital; a cholesterol of 0 was not measured."""
    import pandas as pd

    from concord.environments.files import RemoteFile, data_folders, download, find

    frames = []
    for hospital, rows in HOSPITALS.items():
        name = f"processed.{hospital}.data"
        path = find([name], data_folders("heart-disease", folder))
        path = path or download(RemoteFile(name, None, (f"{HOME}/{name}",)), "heart-disease")
        frame = pd.read_csv(path, header=None, na_values="?")
        if frame.shape != (rows, len(COLUMNS)):
            raise InputError(f"{path}: has {frame.shape} rows and columns, expected {(rows, len(COLUMNS))}")
        frames.append(frame.set_axis(COLUMNS, axis=1).assign(hospital=hospital))
    table = pd.concat(frames, ignore_index=True)
    table["chol"] = table.chol.where(table.chol != 0)
    for column, names in NAMES.items():
        table[column] = table[column].map(names)
    return table.assign(diseased=(table.pop("num") > 0).map({True: "yes", False: "no"}))


@functools.lru_cache(maxsize=2)
def _hospitals(folder: Path | None, test: str) -> "TableEnvironments":
    from concord.environments.table import from_table

    left_out = [] if test == "none" else [test]
    return from_table(patients(folder), environment="hospital", target="diseased", test=left_out)


def environments(config: HeartDiseaseConfig) -> "TableEnvironments":
    """An environment for each hospital."""
    return _hospitals(config.data.data, config.test_hospital)


def model(config: HeartDiseaseConfig) -> "nn.Module":
    """Logistic regression, or a small network."""
    return config.network_options.build(environments(config).table)


def auc_with_interval(outputs: "Tensor", targets: "Tensor") -> dict[str, float]:
    """The area under the ROC curve in a hospital, and its 95 % interval by bootstrap over the patients.

    The area is 0.5, as by chance, if all patients are ill or none is.
    """
    import numpy as np

    scores, diseased = outputs.nan_to_num().double().diff(dim=1).squeeze(1).numpy(), targets.bool().numpy()
    order = np.argsort(scores)
    scores, diseased = scores[order], diseased[order]
    draws = np.random.default_rng(0).multinomial(len(scores), np.full(len(scores), 1 / len(scores)), size=RESAMPLES)
    counts = np.vstack([np.ones(len(scores), dtype=int), draws])  # first the original patients
    healthy = np.pad((counts * ~diseased).cumsum(1), ((0, 0), (1, 0)))
    below, up_to = (healthy[:, np.searchsorted(scores, scores, side)] for side in ("left", "right"))
    pairs = (counts * diseased).sum(1) * healthy[:, -1]
    areas = np.where(pairs, (counts * diseased * (below + up_to)).sum(1) / (2 * np.maximum(pairs, 1)), 0.5)
    low, high = np.quantile(areas[1:], [0.025, 0.975])
    return {"auc": float(areas[0]), "auc_low": float(low), "auc_high": float(high)}


def evaluation(config: HeartDiseaseConfig) -> EnvironmentEvaluation:
    """The usual measures of two classes, and the interval of the area."""
    from concord.training.measures import usual_classification

    usual = usual_classification(2, cutoff=0.5, one_class=0.5)

    def measures(outputs: "Tensor", targets: "Tensor") -> dict[str, float | None]:
        return {**usual.function(outputs, targets), **auc_with_interval(outputs, targets)}

    return EnvironmentEvaluation(measures, {**usual.modes, "auc_low": None, "auc_high": None}, of_outputs=True)


def loss(outputs: "Tensor", targets: "Tensor") -> "Tensor":
    """Cross entropy."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets)


job = Job(
    environments,
    model,
    loss,
    config=HeartDiseaseConfig().with_options(epochs=100, batch_size=32, lr=1e-2, l2=1e-3),
    evaluation=evaluation,
    fit=fit_table,
    baselines=TABLE_BASELINES,
    reproduces="no paper's result: a table of four hospitals, one left out",
)
