"""Measurements of a network's consistency as one list, which becomes JSON, metrics and table cells."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from concord.analysis.consistency.slices import Slice
from concord.analysis.spread import mean_and_std

ACCURACIES = ("ood_accuracy", "validation_accuracy", "held_out_accuracy")
"""A run's own metrics that stand beside its measurements."""


@dataclass(frozen=True)
class Measurement:
    """One number and its place: the whole network, a layer, an environment or a pair of environments.

    Attributes:
        name: the name of the quantity.
        value: the number, or the mean over several runs.
        epsilon: ε, if the number depends on it.
        layer: the parameter's name, for a layer.
        environments: the environment, or the pair (e, e').
        spread: the standard deviation over several runs.
        null: the same number on pseudo-environments, the effect of sampling alone.
        null_spread: the standard deviation of the null over several runs.
    """

    name: str
    value: float
    epsilon: float | None = None
    layer: str | None = None
    environments: tuple[str, ...] = ()
    spread: float | None = None
    null: float | None = None
    null_spread: float | None = None

    @property
    def whole(self) -> bool:
        """Whether the number is for the whole network in all environments."""
        return self.layer is None and not self.environments

    @property
    def metric(self) -> str:
        """Name and place as a metric's name: ``bound/epsilon_0.1``, ``agreement/0.weight``."""
        at = "" if self.epsilon is None else f"/epsilon_{self.epsilon:g}"
        return f"{self.name}{at}{'' if self.layer is None else f'/{self.layer}'}"

    @property
    def heading(self) -> str:
        """Name and ε as a table's heading: ``I at least, ε 0.1``."""
        at = "" if self.epsilon is None else f", ε {self.epsilon:g}"
        return _HEADINGS.get(self.name, self.name.replace("_", " ")) + at


_HEADINGS = {
    "ood_accuracy": "o.o.d. accuracy",
    "bound": "I at least",
    "quadratic_low": "quadratic",
    "log_ratio": "log ratio",
    "agreement": "sign agreement",
}


@dataclass(frozen=True)
class Consistency:
    """The measurements of a network.

    Attributes:
        measurements: every number, the whole network's first.
        radius: ρ, in units of θ.
        possible_pairs: d (d - 1), of which some were measured.
        threshold: τ of the kept fraction.
        batches: the number of batches of each environment, for the signs.
        line, plane: slices along the directions of the largest ratios; without curvature along random directions.
    """

    measurements: Sequence[Measurement]
    radius: float
    possible_pairs: int
    threshold: float
    batches: int
    line: Slice | None = None
    plane: Slice | None = None

    def of(self, name: str) -> list[Measurement]:
        """The measurements of this name of the whole network, by ε."""
        return [each for each in self.measurements if each.name == name and each.whole]


def layer_means(name: str, values: Tensor, layers: dict[str, Tensor]) -> list[Measurement]:
    """The mean over all components, and over those of each layer."""
    by_layer = [Measurement(name, float(part.double().mean()), layer=layer) for layer, part in layers.items()]
    return [Measurement(name, float(values.double().mean())), *by_layer]


def with_null(found: Sequence[Measurement], null: Sequence[Measurement]) -> list[Measurement]:
    """Measurements of a network or its layers, with the null on pseudo-environments."""
    values = {each.metric: each.value for each in null if not each.environments}
    without = [each.environments or each.name.startswith("chance") for each in found]
    return [
        each if none else replace(each, null=values.get(each.metric)) for each, none in zip(found, without, strict=True)
    ]


def as_json(found: Consistency) -> dict[str, Any]:
    """The measured part of ``concord analyze --json``."""
    measured = found.measurements
    log_ratio = found.of("log_ratio")
    signs = {name: found.of(name) for name in ("agreement", "kept_fraction", "norm")}
    has_null = any(each.null is not None for each in measured)
    result = {
        "absolute_radius": found.radius,
        "inconsistency": _inconsistency(found, "value") | ({"null": _inconsistency(found, "null")} if has_null else {}),
        "possible_pairs": found.possible_pairs,
        "pairs": _pairs(measured),
        "losses": {each.environments[0]: each.value for each in measured if each.name == "loss"},
        "gradient_norms": {each.environments[0]: each.value for each in measured if each.name == "gradient_norm"},
        "layers": _layers(found),
    }
    if signs["agreement"]:
        chance = [found.of(f"chance_{name}")[0].value for name in ("agreement", "fraction")]
        result["signs"] = {
            "threshold": found.threshold,
            "batches": found.batches,
            "environments": {_key(name): each[0].value for name, each in signs.items()},
            "null": {_key(name): each[0].null for name, each in signs.items()},
            "chance": dict(zip(("agreement", "kept"), chance, strict=True)),
        }
    if log_ratio:
        result["log_ratio"] = {"environments": log_ratio[0].value, "null": log_ratio[0].null}
    return result | {"measurements": [_plain(each) for each in measured]}


def read_measurements(result: Mapping[str, Any]) -> list[Measurement]:
    """The measurements in the JSON of a run, and its accuracies before them."""
    accuracies = [Measurement(name, value) for name, value in result["metrics"].items()]
    return accuracies + [
        Measurement(**{**each, "environments": tuple(each.get("environments", ()))}) for each in result["measurements"]
    ]


def as_metrics(found: Sequence[Measurement]) -> dict[str, float]:
    """The whole network's numbers by metric."""
    metrics = {}
    for each in found:
        if each.whole:
            metrics[each.metric] = each.value
            if each.null is not None:
                metrics[f"null_{each.metric}"] = each.null
    return metrics


def as_cells(found: Sequence[Measurement]) -> dict[str, float]:
    """The main numbers by headings of a table; those that depend on ε also over their null."""
    cells = {}
    for each in found:
        if each.whole and each.name in _HEADINGS:
            cells[each.heading] = each.value
            if each.null is not None:
                cells[f"{each.heading}, null"] = each.null
                if each.epsilon is not None and each.null != 0:
                    cells[f"{each.heading}, over null"] = each.value / each.null
    return cells


def over_runs(runs: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Mean and spread over runs of every number of the whole network."""
    places: dict[str, list[Measurement]] = {}
    for each in itertools.chain.from_iterable(runs):
        if each.whole:
            places.setdefault(each.metric, []).append(each)
    found = []
    for same in places.values():
        value, spread = mean_and_std([each.value for each in same]).values()
        null, null_spread = mean_and_std([each.null for each in same if each.null is not None]).values()
        assert value is not None
        found.append(replace(same[0], value=value, spread=spread, null=null, null_spread=null_spread))
    return found


def method_as_json(found: Sequence[Measurement]) -> dict[str, Any]:
    """Mean and spread over a method's runs by metric, and its learning consistency -I^ε (eq. 2 of the paper)."""
    ilc: dict[float, dict[str, Any]] = {}
    row: dict[str, Any] = {}
    for each in found:
        if each.epsilon is not None:
            consistency = ilc.setdefault(each.epsilon, {"epsilon": each.epsilon})
            if each.name in ("bound", "quadratic_low"):
                consistency[each.name.removesuffix("_low")] = {"mean": -each.value, "std": each.spread}
        row[each.metric] = {"mean": each.value, "std": each.spread}
        if each.null is not None:
            row[f"null_{each.metric}"] = {"mean": each.null, "std": each.null_spread}
    return {"ilc": list(ilc.values()), **row}


def _inconsistency(found: Consistency, of: str) -> dict[str, Any]:
    low, high, bound = (
        [getattr(each, of) for each in found.of(name)] for name in ("quadratic_low", "quadratic_high", "bound")
    )
    quadratic = {"quadratic": [list(ends) for ends in zip(low, high, strict=True)]} if low else {}
    return quadratic | ({"bound": bound} if bound else {})


def _pairs(measured: Sequence[Measurement]) -> list[dict[str, Any]]:
    pairs = []
    for own, other in dict.fromkeys(each.environments for each in measured if len(each.environments) == 2):
        found = [each for each in measured if each.environments == (own, other)]
        ratios = [each for each in found if each.name == "ratio"]
        bounds = [each.value for each in found if each.name == "bound"]
        pairs.append(
            {
                "from": own,
                "to": other,
                "value": bounds or [each.value for each in ratios],
                "quadratic": [(each.epsilon or 0.0) * each.value for each in ratios],
                "converged": all(each.value for each in found if each.name == "converged"),
            }
        )
    return pairs


def _layers(found: Consistency) -> list[dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    for each in found.measurements:
        if each.layer is not None:
            layer = layers.setdefault(each.layer, {"name": each.layer})
            layer[_key(each.name)] = each.value
            if each.name in ("agreement", "log_ratio"):
                layer[f"null_{each.name}"] = each.null
            if each.name == "agreement":
                layer["chance"] = found.of("chance_agreement")[0].value
    return list(layers.values())


def _key(name: str) -> str:
    return "kept" if name == "kept_fraction" else name


def _plain(measurement: Measurement) -> dict[str, Any]:
    return {name: value for name, value in asdict(measurement).items() if value not in (None, ())}
