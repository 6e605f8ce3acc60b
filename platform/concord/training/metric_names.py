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
_TRAINING_METRICS = (
    *("step/loss", "step/worst_loss", "step/kept_fraction", "step/lr"),
    *("epoch", "steps_per_second", "kept_fraction", "skipped_environments", "workers"),
    MODEL_EVALUATIONS,
    *("held_out_spread", "spread_reached", "out_of_patience", "kept_epoch"),
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


def short_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those of single environments and layers."""
    return {name: value for name, value in metrics.items() if "/" not in name}


def split_of(metric: str, measure: str) -> str | None:
    """The split, if it is the metric of this measure in one environment."""
    parts = metric.split("/", 2)
    return parts[1] if len(parts) == 3 and parts[0] == measure else None


def layer_metric(measure: str, layer: str) -> str:
    """The metric of a measure in one layer, or environment."""
    return f"{measure}/{layer}"


def environments_of(metric: str, environments: Environments) -> tuple[str, ...]:
    """The names of the environments that a metric is a mean over, or the worst of; none for other metrics."""
    plain = metric.removeprefix("worst_")
    by_split = names_by_split(environments)
    found = [split for split in by_split if plain.startswith(f"{split}_")]
    return by_split[max(found, key=len)] if found else ()


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
        one, other = _differing(found[spelled], source)
        raise InputError(f"{one} and {other}: both would be reported as the metric {spelled}; rename one")


def without_clashes(further: Mapping[str, float], reported: Iterable[str]) -> tuple[dict[str, float], list[str]]:
    """The further metrics with unused names, and the names that clash."""
    taken = {metric_name(name) for name in (*_TRAINING_METRICS, *reported)}
    unique: dict[str, float] = {}
    for name, value in further.items():
        if metric_name(name) not in taken:
            unique[name] = value
            taken.add(metric_name(name))
    return unique, [name for name in further if name not in unique]


def names_by_split(environments: Environments, held_out: bool = True) -> dict[str, tuple[str, ...]]:
    """The names of the environments of each split; a monitored environment is a split of its own.

    Without validation environments the held-out examples, if there are any, are also the validation. They are whole
    environments, or parts of the training environments.
    """
    inner = environments.held_out or environments.train if held_out else ()
    return {
        "train": environments.train,
        "held_out": inner,
        "validation": environments.validation or inner,
        "ood": environments.test,
        **{name: (name,) for name in environments.monitored},
    }


def _metrics(
    environments: Environments, measures: Collection[str], layers: Iterable[str]
) -> Iterator[tuple[str, Source]]:
    """The names of all metrics that a run on these environments, or with one of them left out, can have."""
    for name in _TRAINING_METRICS:
        yield name, (f"the metric {name}",)
    for layer in layers:
        yield layer_metric("kept_fraction", layer), ("the fraction kept", f"parameter {layer!r}")
    described = [("loss", "the loss"), *((name, f"measure {name!r}") for name in measures)]
    for split, names in names_by_split(environments).items():
        where = SPLITS.get(split, f"monitored environment {split!r}")
        for measure, what in described:
            yield split_metric(split, measure), (where, what)
            yield split_metric(split, measure, worst=True), (f"the worst of {where}", what)
            for name in names:
                yield environment_metric(measure, split, name), (where, what, f"environment {name!r}")
    for name in environments.train:
        yield layer_metric("weight", name), ("the weight", f"environment {name!r}")


def _differing(one: Source, other: Source) -> tuple[str, str]:
    """The differing part of two metrics, or their descriptions if they are of different kinds."""
    pairs = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
    if len(one) == len(other) and len(pairs) == 1:
        return pairs[0]
    return ", ".join(one), ", ".join(other)
