"""What MLflow's pages say in words: the description of a run, and the model card of a registered version, in Markdown.

Both follow from the record of the run, so that MLflow can be given them again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from concord.environments import Environments
from concord.environments.summary import DataSummary
from concord.execution.preflight import PreflightResult
from concord.options import option_values
from concord.record import Run
from concord.redaction import redact
from concord.table import format_value
from concord.tracking import Store
from concord.tracking.registry import STUDY, serve_command
from concord.training.job import JobFile
from concord.training.metric_names import environment_metric, environments_of, split_metric
from concord.training.options import ResolvedConfig, ResolvedTrainConfig

_USED_FOR = {
    "train": "training",
    "held-out": "training, held out",
    "validation": "selection",
    "ood": "test",
    "monitored": "monitoring",
}
_SPLITS = {"train": "train", "held-out": "held_out", "validation": "validation", "ood": "ood"}
_MOST_ROWS = 16  # of environments; more are summarized by purpose, so that a card is one screen
_MOST_NAMES = 12  # of inputs or classes
# Options of the training that a card names.
_NAMED_OPTIONS = ("optimizer", "lr", "l2", "epochs", "batch_size", "seed")
_NAMED_OF_BASELINES = ("ridge_penalty", "boosting_trees", "boosting_rate", "boosting_leaves")


def result_lines(
    run: Run, checked: PreflightResult, warnings: Sequence[str], registration: str | None, model: str | None
) -> str:
    """The result of a run for its description: the criterion and its measure by split, warnings, and the model."""
    metrics, criterion = run.metrics, checked.criterion[0]
    measure = criterion_measure(checked)
    splits = {"train": "train", "held_out": "held out", "validation": "validation", "ood": "test"}
    values = [
        f"{shown} {format_value(metrics[name])}"
        for split, shown in splits.items()
        if (name := split_metric(split, measure)) in metrics
    ]
    first = f"**{measure}** {', '.join(values)}" if values else f"**{criterion}** {format_value(metrics[criterion])}"
    if model is not None:
        first += f"  \nModel `{model}`" + (f": {registration}" if registration is not None else "")
    return "\n".join([first, "", *(f"- {line}" for line in warnings)]).strip()


def model_card(
    job: JobFile,
    config: ResolvedConfig,
    run: Run,
    checked: PreflightResult,
    lineage: Mapping[str, str],
    warnings: Sequence[str],
    store: Store,
    uri: str,
) -> str:
    """The model card of a version: its task, data, environments with their measures, selection, limits, and use.

    ``lineage`` says, as tags do, whether a study chose it; ``warnings`` are the lines of the run's end; ``uri`` is the
    version's, ``models:/NAME/VERSION``.
    """
    parts = [
        f"**Task.** {_task(job, config, checked.environments)}",
        f"**Data.** {_data(run, checked.environments)}",
        _environments(run, checked),
        f"**Rule.** {_rule(config, checked)}",
        f"**Selection.** {_selection(lineage, checked)}",
        f"**Limits.** {_limits(checked.environments, warnings)}",
        f"**Use.**\n\n```python\n{_loading(store, uri)}\n```\n\n```sh\n{serve_command(store.uri, uri)}\n```",
    ]
    return "\n\n".join(filter(None, parts))


def criterion_measure(checked: PreflightResult) -> str:
    """The measure of the criterion, such as the accuracy; else the accuracy or the loss."""
    named = [measure for measure in checked.measures if checked.criterion[0].endswith(f"_{measure}")]
    return max(named, key=len, default="accuracy" if "accuracy" in checked.measures else "loss")


def _task(job: JobFile, config: ResolvedConfig, environments: Environments) -> str:
    raw, classes = environments.raw, environments.classes
    target = option_values(config).get("target")
    of = f" of `{target}`" if target else ""
    if raw is not None:
        names = _names(raw.outputs)
        gives = f"the probability of each class{of} ({names})" if len(raw.outputs) > 1 else f"the number `{names}`"
        return f"Job {job.name}: {gives}, from {_names(raw.encoder.columns)}."
    return f"Job {job.name}" + (f": classes {_names(classes)}, in this order." if classes is not None else ".")


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _data(run: Run, environments: Environments) -> str:
    source = run.options.get("data")
    examples = sum(part["examples"] for part in run.data)
    counted = f"{examples:,} examples" if examples else "made by the job's own loop"
    named = f"`{source}`, " if source else ""
    version = f", version {environments.version}" if environments.version is not None else ""
    return f"{named}{counted}{version}."


def _environments(run: Run, checked: PreflightResult) -> str:
    """A table of the environments, with the criterion's measure and the loss in each."""
    parts, metrics = [DataSummary.read(part) for part in run.data], run.metrics
    measures = list(dict.fromkeys([criterion_measure(checked), "loss"]))
    if not parts:
        rows = [[name, format_value(value)] for name, value in metrics.items() if "/" not in name]
        return _table(["metric", "value"], rows)
    heading = ["environment", "used for", "examples", *measures]
    if len(parts) <= _MOST_ROWS:
        rows = [
            [
                part.name,
                _USED_FOR[part.purpose],
                f"{part.examples:,}",
                *(_value(metrics, each, part) for each in measures),
            ]
            for part in parts
        ]
        return _table(heading, rows)
    rows = []
    for purpose, shown in _USED_FOR.items():
        if not (some := [part for part in parts if part.purpose == purpose]):
            continue
        split = _SPLITS.get(purpose)
        values = [
            _mean_and_worst(metrics, split_metric(split, each), split_metric(split, each, worst=True)) if split else ""
            for each in measures
        ]
        rows.append([f"{len(some)} environments", shown, f"{sum(part.examples for part in some):,}", *values])
    return _table(heading, rows)


def _value(metrics: Mapping[str, float], measure: str, part: DataSummary) -> str:
    """A measure in one part of the data; the place of its interval."""
    value = metrics.get(environment_metric(measure, _SPLITS.get(part.purpose, part.name), part.name))
    return "" if value is None else format_value(value)


def _mean_and_worst(metrics: Mapping[str, float], mean: str, worst: str) -> str:
    if mean not in metrics:
        return ""
    return format_value(metrics[mean]) + (f", worst {format_value(metrics[worst])}" if worst in metrics else "")


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"

    return "\n".join([line(heading), line(["---"] * len(heading)), *map(line, rows)])


def _rule(config: ResolvedConfig, checked: PreflightResult) -> str:
    values = option_values(config)
    method = config.method or "the job's own loop"
    if checked.objective is not None:
        method = f"{checked.objective}, {method}"
    names = [name for name in (*_NAMED_OF_BASELINES, *_NAMED_OPTIONS) if name not in config.unused()]
    told = [f"{name} {values[name]}" for name in names if values.get(name) is not None]
    environments = len(checked.environments.train)
    over = f" over {environments} environments" if isinstance(config, ResolvedTrainConfig) else ""
    return f"{method}{over}; {', '.join(told)}."


def _selection(lineage: Mapping[str, str], checked: PreflightResult) -> str:
    criterion, mode = checked.criterion
    lines = ["A run by itself; no search chose its options."]
    selection = lineage.get("concord.selection", "")
    if study := lineage.get(STUDY):
        lines = [f"Trial {lineage.get('concord.trial')} of the study {study}, chosen by selection {selection}."]
    size = "largest" if mode == "max" else "smallest"
    lines.append(f"Versions are compared by the {size} `{criterion}`.")
    measured = set(environments_of(criterion, checked.environments))
    if measured & set(checked.environments.test) or "oracle" in selection:
        lines.append("**Oracle:** the test environments decided, so its measures there are too good.")
    elif checked.environments.test:
        lines.append("The test environments decided nothing (no oracle).")
    return " ".join(lines)


def _limits(environments: Environments, warnings: Sequence[str]) -> str:
    """What is not known, and the warnings of the run."""
    test = environments.test
    if not environments.train:
        known = "It was measured as the job's loop says."
    elif test:
        count = "one environment" if len(test) == 1 else f"{len(test)} environments"
        known = f"Measured in {count} that it has not seen ({_names(test)}); another one may differ more."
    else:
        known = "No environment was kept as a test: nothing says how it does in one that it has not seen."
    return "\n".join([known, *(["", *(f"- {line}" for line in warnings)] if warnings else [])])


def _loading(store: Store, uri: str) -> str:
    return f'import mlflow\n\nmlflow.set_tracking_uri("{redact(store.uri)}")\nmodel = mlflow.pyfunc.load_model("{uri}")'
