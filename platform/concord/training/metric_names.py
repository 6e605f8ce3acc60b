"""The names of a run's metrics, all known before the run; names that clash in the store are refused.

``{split}_{measure}`` is a mean over environments, ``worst_{split}_{measure}`` its worst environment, and
``{measure}/{split}/{environment}`` one of them; ``kept_fraction/{layer}`` is one layer's,
``weight/{environment}`` an environment's weight in a weighting.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from concord.environments import Environments
from concord.environments.collection import SPLITS
from concord.errors import InputError
from concord.metric_name import metric_name
from concord.training.checkpoint import RESUMED_EPOCH, RESUMED_SECONDS, RESUMED_WORKERS

MODEL_EVALUATIONS = "model_evaluations"
"""The number in training, over all workers, of a risk that counts them, see :mod:`concord.gradients.risk`."""

# The metrics of every training run.
_OF_TRAINING = (
    *("step/loss", "step/worst_loss", "step/kept_fraction", "step/lr"),
    *("epoch", "steps_per_second", "kept_fraction", "skipped_environments", "workers"),
    MODEL_EVALUATIONS,
    *("held_out_spread", "spread_reached", "kept_epoch"),
    *(RESUMED_EPOCH, RESUMED_WORKERS, RESUMED_SECONDS),
)

Source = tuple[str, ...]
"""The description of a metric, in parts."""


def split_metric(split: str, measure: str, worst: bool = False) -> str:
    """The metric of a measure over the environments of a split, or of the worst of them."""
    return f"worst_{split}_{measure}" if worst else f"{split}_{measure}"


def environment_metric(measure: str, split: str, environment: str) -> str:
    """The metric of a measure in one environment."""
    return f"{measure}/{split}/{environment}"


def split_of(metric: str, measure: str) -> str | None:
    """The split, if it is the metric of this measure in one environment."""
    parts = metric.split("/", 2)
    return parts[1] if len(parts) == 3 and parts[0] == measure else None


def layer_metric(measure: str, layer: str) -> str:
    """The metric of a measure in one layer, or environment."""
    return f"{measure}/{layer}"


def environments_of(metric: str, environments: Environments) -> tuple[str, ...]:
    """The names of the environments that a metric is a mean over, or the worst of; none for other metrics."""
    of_split = metric.removeprefix("worst_")
    found = [split for split in _names_by_split(environments) if of_split.startswith(f"{split}_")]
    return _names_by_split(environments)[max(found, key=len)] if found else ()


def check_metric_names(environments: Environments, measures: Collection[str], layers: Iterable[str]) -> None:
    """Refuse names that give one name to two metrics in the store, which replaces some characters (InputError).

    ``measures`` are those of the job and its evaluation, without the loss; ``layers`` are the trainable parameters.
    """
    found: dict[str, Source] = {}
    for name, source in _metrics(environments, measures, layers):
        spelled = metric_name(name)
        if spelled not in found:
            found[spelled] = source
            continue
        ours, theirs = _differing(found[spelled], source)
        raise InputError(f"{ours} and {theirs}: both would be reported as the metric {spelled}; rename one")


def without_clashes(further: Mapping[str, float], reported: Iterable[str]) -> tuple[dict[str, float], list[str]]:
    """The further metrics with unused names, and the names that clash."""
    taken = {metric_name(name) for name in (*_OF_TRAINING, *reported)}
    kept: dict[str, float] = {}
    left_out = []
    for name, value in further.items():
        if metric_name(name) in taken:
            left_out.append(name)
        else:
            kept[name] = value
            taken.add(metric_name(name))
    return kept, left_out


def _names_by_split(environments: Environments) -> dict[str, tuple[str, ...]]:
    """The names of the environments of each split; a monitored environment is a split of its own."""
    return {
        "train": environments.train,
        "held_out": environments.train,
        "validation": environments.validation or environments.train,
        "ood": environments.test,
        **{name: (name,) for name in environments.monitored},
    }


def _metrics(
    environments: Environments, measures: Collection[str], layers: Iterable[str]
) -> Iterator[tuple[str, Source]]:
    """The names of all metrics that a run on these environments, or with one of them left out, can have."""
    for name in _OF_TRAINING:
        yield name, (f"the metric {name}",)
    for layer in layers:
        yield layer_metric("kept_fraction", layer), ("the fraction kept", f"parameter {layer!r}")
    of_measures = [("loss", "the loss"), *((name, f"measure {name!r}") for name in measures)]
    for split, names in _names_by_split(environments).items():
        of_split = SPLITS.get(split, f"monitored environment {split!r}")
        for measure, of_measure in of_measures:
            yield split_metric(split, measure), (of_split, of_measure)
            yield split_metric(split, measure, worst=True), (f"the worst of {of_split}", of_measure)
            for name in names:
                yield environment_metric(measure, split, name), (of_split, of_measure, f"environment {name!r}")
    for name in environments.train:
        yield layer_metric("weight", name), ("the weight", f"environment {name!r}")


def _differing(one: Source, other: Source) -> tuple[str, str]:
    """The differing part of two metrics, or their descriptions if they are of different kinds."""
    pairs = [(ours, theirs) for ours, theirs in zip(one, other, strict=False) if ours != theirs]
    if len(one) == len(other) and len(pairs) == 1:
        return pairs[0]
    return ", ".join(one), ", ".join(other)
