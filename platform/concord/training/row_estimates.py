"""Measures of environments from the predictions of their rows, with what each row or cluster adds to them.

A row that several seeds predicted counts once: its numbers are averaged over the seeds, so that rows are resampled with
all their seeds, and the value is the mean of the seeds' values. If each seed has data of its own, all rows count.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from concord.analysis.intervals import Estimate, Values, area_under_curve, jackknife, mean_of_rows, scale_of
from concord.errors import InputError
from concord.training.left_out import CLUSTER, CUTOFF, PROBABILITY, USUAL_CUTOFF
from concord.training.measures import classification, errors_of

if TYPE_CHECKING:
    import pandas  # takes a third of a second

MEASURES = (
    *("accuracy", "auc", "average_precision", "brier", "calibration_error", "f1", "loss", "mae", "mse", "r2", "recall"),
    "specificity",
)
WEIGHT = "weight"  # the column of rows' weights in a mean
_LEASTPROBABILITY = 1e-12
_AGREEMENT = 1e-3  # runs compute in float32


def row_estimates(predictions: "pandas.DataFrame", measure: str) -> dict[str, dict[str, Estimate]]:
    """The measure of each method in each environment, by their names; without those where it is not known of rows.

    Args:
        predictions: as ``Comparison.predictions`` has them; with a column ``cluster`` clusters are the units.
        measure: its name, of :mod:`concord.training.measures`; recall and specificity are at the column ``cutoff``,
            0.5 without one, and where it is NaN means over the classes.
    """
    found: dict[str, dict[str, Estimate]] = {}
    for (method, environment), rows in predictions.groupby(["method", "environment"], sort=False):
        estimate = _estimate(rows, measure)
        if estimate is not None:
            found.setdefault(method, {})[environment] = estimate
    return found


def _estimate(rows: "pandas.DataFrame", measure: str) -> Estimate | None:
    """Of one method in one environment, over all seeds."""
    ordered = rows.sort_values(["seed", "row"])
    seeds = ordered.seed.nunique()
    if len(ordered) % seeds or "target" not in ordered:
        return None
    of_seeds = ordered.target.to_numpy().reshape(seeds, -1)
    if (of_seeds != of_seeds[0]).any():  # each seed has other rows
        seeds = 1

    def by_seed(column: str) -> Values:
        found: Values = ordered[column].to_numpy().reshape(seeds, -1)
        return found

    targets = by_seed("target")[0]
    clusters = None
    if CLUSTER in ordered:
        clusters = np.unique(by_seed(CLUSTER)[0].astype(str), return_inverse=True)[1]
    weights = by_seed(WEIGHT)[0] if WEIGHT in ordered else None
    mean = functools.partial(mean_of_rows, clusters=clusters, weights=weights)
    classes = [name for name in ordered.columns if name.startswith(PROBABILITY)]
    if not classes:
        return _of_numbers(by_seed("prediction").astype(float), targets.astype(float), measure, mean, clusters)
    probabilities = np.stack([by_seed(name) for name in classes], 2)
    codes = np.array([classes.index(f"{PROBABILITY}{target}") for target in targets])
    if measure == "accuracy":
        return mean((by_seed("prediction") == targets).mean(0))
    if measure == "loss":
        chosen = probabilities[:, np.arange(len(codes)), codes]
        return mean(-np.log(np.maximum(chosen, _LEASTPROBABILITY)).mean(0))
    if measure == "brier":
        errors = np.square(probabilities - np.eye(len(classes))[codes])
        return mean((errors[..., 1] if len(classes) == 2 else errors.sum(2)).mean(0))
    if weights is not None:
        return None
    if measure == "auc" and len(classes) == 2:
        return area_under_curve(probabilities[..., 1], codes == 1, clusters)
    if measure not in ("auc", "average_precision", "f1", "recall", "specificity", "calibration_error"):
        return None
    cutoff = float(ordered[CUTOFF].iloc[0]) if CUTOFF in ordered else USUAL_CUTOFF
    at_cutoff = len(classes) == 2 and measure in ("recall", "specificity") and not math.isnan(cutoff)
    evaluation = classification(measure, cutoff=cutoff if at_cutoff else None)
    logits = torch.from_numpy(np.log(np.maximum(probabilities, _LEASTPROBABILITY)))
    of_rows = functools.partial(_mean_over_seeds, evaluation, measure, logits, torch.from_numpy(codes))
    return jackknife(of_rows, len(codes), clusters)


def _of_numbers(
    predicted: Values, targets: Values, measure: str, mean: Callable[[Values], Estimate], clusters: Values | None
) -> Estimate | None:
    if measure == "mse":
        return mean(np.square(predicted - targets).mean(0))
    if measure == "mae":
        return mean(np.abs(predicted - targets).mean(0))
    if measure != "r2":
        return None

    def explained(places: Values) -> float | None:
        truth = torch.from_numpy(targets[places])
        each = [errors_of(torch.from_numpy(seed[places]), truth)["r2"] for seed in predicted]
        found = [value for value in each if value is not None]
        return sum(found) / len(found) if len(found) == len(each) else None

    return jackknife(explained, len(targets), clusters)


def _mean_over_seeds(
    evaluation: Any, measure: str, logits: torch.Tensor, codes: torch.Tensor, places: Values
) -> float | None:
    each = [evaluation.function(of_seed[places], codes[places])[measure] for of_seed in logits]
    return None if None in each else sum(each) / len(each)


def intervals_of(predictions: "pandas.DataFrame", measure: str) -> "pandas.DataFrame":
    """A row for each method and environment: value, low, high, units, seeds and std (over seeds).

    Raises:
        InputError: the measure is not known of these predictions.
    """
    import pandas

    estimates = row_estimates(predictions, measure)
    if not estimates:
        raise InputError(f"measure {measure}: is not known of these predictions; there are {', '.join(MEASURES)}")
    each = {
        seed: row_estimates(rows, measure)
        for seed, rows in (predictions.groupby("seed") if predictions.seed.nunique() > 1 else ())
    }
    found = {}
    for method, of_method in estimates.items():
        for environment, estimate in of_method.items():
            low, high = estimate.interval(scale_of(measure)) or (math.nan, math.nan)
            values = [
                of_seed[method][environment].value
                for of_seed in each.values()
                if environment in of_seed.get(method, {})
            ]
            found[method, environment] = {
                "value": estimate.value,
                "low": low,
                "high": high,
                "units": estimate.units,
                "seeds": max(len(values), 1),
                "std": statistics.stdev(values) if len(values) > 1 else math.nan,
            }
    index = pandas.MultiIndex.from_tuples(list(found), names=["method", "environment"])
    return pandas.DataFrame(list(found.values()), index=index)


def values_agree(estimates: Mapping[str, Estimate], values: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """The estimates by environment whose values, means over seeds, the runs reported.

    A job may have a measure of its own under a known name.
    """
    means = {name: sum(each) / len(each) for name, each in values.items() if each}
    return {
        name: each
        for name, each in estimates.items()
        if name in means and abs(each.value - means[name]) <= _AGREEMENT * max(1.0, abs(means[name]))
    }
