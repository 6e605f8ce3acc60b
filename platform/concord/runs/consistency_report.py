"""What was found of a model's consistency as JSON, figures and metrics; and what several runs say together."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from concord.analysis.consistency.network import NetworkConsistency
from concord.analysis.figures import save
from concord.analysis.network_consistency_figures import (
    RunPoint,
    layers_figure,
    line_figure,
    plane_figure,
    runs_figure,
)
from concord.runs.consistency import Analysis

_ACCURACIES = ("ood_accuracy", "validation_accuracy", "held_out_accuracy")


def as_json(analysis: Analysis, figures: Mapping[str, str]) -> dict[str, Any]:
    """The contract of ``concord analyze --json``, of one model."""
    measured, null, settings = analysis.measured, analysis.null, analysis.measured.settings
    parts = set(settings.parts)

    def inconsistency(of: NetworkConsistency) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if "curvature" in parts:
            found["quadratic"] = [list(ends) for ends in of.quadratic]
        if "bound" in parts:
            found["bound"] = of.bound
        return found

    result: dict[str, Any] = {
        "job": analysis.trained.job.name,
        "run": analysis.trained.name,
        "run_id": analysis.trained.run_id,
        "method": analysis.trained.config.method,
        "seed": analysis.trained.config.run.seed,
        "epsilon": list(settings.epsilon),
        "radius": settings.radius,
        "absolute_radius": measured.radius,
        "environments": len(measured.losses),
        "inconsistency": inconsistency(measured) | ({"null": inconsistency(null)} if null is not None else {}),
        "possible_pairs": measured.possible_pairs,
        "pairs": [
            {
                "from": pair.own,
                "to": pair.other,
                "value": list(pair.bounds or pair.ratios),
                "quadratic": [eps * ratio for eps, ratio in zip(settings.epsilon, pair.ratios, strict=False)],
                "converged": pair.converged,
            }
            for pair in measured.pairs
        ],
        "losses": measured.losses,
        "gradient_norms": measured.gradient_norms,
        "layers": _layers(measured, null),
        "seconds": round(analysis.seconds, 1),
        "metrics": {name: value for name, value in analysis.trained.metrics.items() if name in _ACCURACIES},
        "figures": dict(figures),
    }
    if measured.signs is not None:
        result["signs"] = {"threshold": settings.threshold, "batches": measured.signs.batches} | {
            what: {"agreement": of.signs.whole.agreement, "kept": of.signs.whole.kept, "norm": of.signs.whole.norm}
            for what, of in (("environments", measured), ("null", null))
            if of is not None and of.signs is not None
        }
        result["signs"]["chance"] = {
            "agreement": measured.signs.chance_agreement,
            "kept": measured.signs.chance_kept,
        }
    if measured.log_ratio is not None:
        result["log_ratio"] = {"environments": measured.log_ratio, "null": null.log_ratio if null else None}
    return result


def _layers(measured: NetworkConsistency, null: NetworkConsistency | None) -> list[dict[str, Any]]:
    names = list(measured.signs.layers) if measured.signs is not None else list(measured.log_ratios)
    layers = []
    for name in names:
        layer: dict[str, Any] = {"name": name}
        if measured.signs is not None:
            layer |= {**asdict(measured.signs.layers[name]), "chance": measured.signs.chance_agreement}
            if null is not None and null.signs is not None:
                layer["null_agreement"] = null.signs.layers[name].agreement
        if measured.log_ratios:
            layer["log_ratio"] = measured.log_ratios[name]
            layer["null_log_ratio"] = null.log_ratios[name] if null is not None else None
        layers.append(layer)
    return layers


def draw(analysis: Analysis, folder: Path) -> dict[str, str]:
    """Draw what was measured; the files' paths by the figures' names."""
    measured, null, name = analysis.measured, analysis.null, analysis.trained.name
    drawn = {}
    if measured.signs is not None or measured.log_ratios:
        drawn["layers"] = layers_figure(measured, null, name)
    if measured.line is not None and measured.plane is not None:
        steepest = "the direction of the largest ratio of curvatures"
        if "curvature" not in measured.settings.parts:
            steepest = "a random direction"
        first, second = steepest, steepest.replace("largest", "next largest").replace("a random", "another random")
        if analysis.through is not None:
            first, second = f"the line to {analysis.through}", steepest
        drawn["line"] = line_figure(measured.line, name, f"along {first}")
        drawn["plane"] = plane_figure(measured.plane, name, f"along {first}", f"along {second}")
    return {what: str(save(figure, folder / f"{what}.png")) for what, figure in drawn.items()}


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a model's JSON as metrics of its run; what a run measures itself is called ``consistency/…``."""
    found: dict[str, float] = {}
    null = result["inconsistency"].get("null", {})
    for place, epsilon in enumerate(result["epsilon"]):
        for prefix, of in (("", result["inconsistency"]), ("null_", null)):
            if "quadratic" in of:
                low, high = of["quadratic"][place]
                found[f"analyzed/{prefix}quadratic_low/epsilon_{epsilon:g}"] = low
                found[f"analyzed/{prefix}quadratic_high/epsilon_{epsilon:g}"] = high
            if "bound" in of:
                found[f"analyzed/{prefix}bound/epsilon_{epsilon:g}"] = of["bound"][place]
    if "log_ratio" in result:
        found["analyzed/log_ratio"] = result["log_ratio"]["environments"]
        found["analyzed/null_log_ratio"] = result["log_ratio"]["null"]
    if "signs" in result:
        for what, prefix in (("environments", ""), ("null", "null_")):
            found[f"analyzed/{prefix}agreement"] = result["signs"][what]["agreement"]
            found[f"analyzed/{prefix}kept_fraction"] = result["signs"][what]["kept"]
    return found


def _number(found: Any) -> float:
    """A bound, or the lower of two ends."""
    return float(found[0] if isinstance(found, list | tuple) else found)


def values_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The main numbers of a model's JSON by headings, for a table; those at every ε with it."""
    found: dict[str, float] = {}
    if "ood_accuracy" in result["metrics"]:
        found["o.o.d. accuracy"] = result["metrics"]["ood_accuracy"]
    own, null = result["inconsistency"], result["inconsistency"].get("null", {})
    for place, epsilon in enumerate(result["epsilon"]):
        for part, heading in (("bound", "I at least"), ("quadratic", "quadratic")):
            if part not in own:
                continue
            here, by_chance = (_number(of[part][place]) if part in of else None for of in (own, null))
            assert here is not None
            found[f"{heading}, ε {epsilon:g}"] = here
            if by_chance is not None:
                found[f"{heading}, ε {epsilon:g}, null"] = by_chance
                found[f"{heading}, ε {epsilon:g}, over null"] = here / by_chance
    if "log_ratio" in result:
        found["log ratio"], found["log ratio, null"] = (result["log_ratio"][of] for of in ("environments", "null"))
    if "signs" in result:
        for of, said in (("environments", ""), ("null", ", null")):
            found[f"sign agreement{said}"] = result["signs"][of]["agreement"]
    return found


def by_method(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs by what trained them: mean and spread over seeds of what was found, and the learning consistency -I^ε.

    Args:
        results: the models' JSON; those of one method differ in the seed alone.

    Returns:
        For each method ``method``, ``seeds``, and by number ``{"mean", "std"}``; ``ilc`` has for each ε that of the
        lower bounds on I^ε, and of the quadratic's lower ends, with a minus sign (eq. 2 of the paper). The spread of
        one run is None.
    """
    rows = []
    for method in dict.fromkeys(str(result["method"]) for result in results):
        of_method = [result for result in results if result["method"] == method]
        values: dict[str, list[float]] = {}
        for result in of_method:
            for name, value in metrics_of(result).items():
                values.setdefault(name.removeprefix("analyzed/"), []).append(value)
            for name in _ACCURACIES:
                if name in result["metrics"]:
                    values.setdefault(name, []).append(result["metrics"][name])
        spread = {name: _spread(found) for name, found in values.items()}
        ilc = []
        for epsilon in of_method[0]["epsilon"]:
            of_epsilon = {"epsilon": epsilon}
            for name, key in (("bound", "bound"), ("quadratic", "quadratic_low")):
                if (found := spread.get(f"{key}/epsilon_{epsilon:g}")) is not None:
                    of_epsilon[name] = {"mean": -found["mean"], "std": found["std"]}
            ilc.append(of_epsilon)
        rows.append({"method": method, "seeds": len(of_method), "ilc": ilc, **spread})
    return rows


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def _inconsistency(result: Mapping[str, Any], of: str, part: str) -> float | None:
    """What was found of I^ε at the largest ε, on environments or on the null; None if it was not asked for."""
    found = result["inconsistency"]
    values = (found if of == "environments" else found.get("null", {})).get(part)
    return None if values is None else _number(values[-1])


# The panels of a figure of several runs: what is shown, on environments or on the null.
_PANELS: dict[str, Callable[[Mapping[str, Any], str], float | None]] = {
    "$I^\\epsilon$ at least, true losses, ε = {:g}": lambda result, of: _inconsistency(result, of, "bound"),
    "$I^\\epsilon$ of the quadratic at least, ε = {:g}": lambda result, of: _inconsistency(result, of, "quadratic"),
    "log ratio of curvatures": lambda result, of: result.get("log_ratio", {}).get(of),
}


def draw_runs(results: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """Draw several runs side by side, at the largest ε; the file's path by the figure's name."""
    epsilon = results[0]["epsilon"][-1]
    accuracy = next((name for name in _ACCURACIES if name in results[0]["metrics"]), None)
    panels: dict[str, list[RunPoint]] = {}
    for label, number in _PANELS.items():
        for result in results:
            value, null = number(result, "environments"), number(result, "null")
            if value is not None and null is not None:
                known = None if accuracy is None else result["metrics"].get(accuracy)
                panels.setdefault(label.format(epsilon), []).append(RunPoint(str(result["method"]), value, null, known))
    if not panels:
        return {}
    figure = runs_figure(panels, (accuracy or "").replace("_", " ").replace("ood", "o.o.d."))
    return {"runs": str(save(figure, folder / "runs.png"))}
