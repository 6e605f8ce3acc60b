"""The model of a finished run, with its options and data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from concord.errors import InputError
from concord.execution.execute import CHECKPOINTS, kept_checkpoint
from concord.execution.restored_options import restored_config
from concord.record import Run, folder_of, require_run
from concord.tracking import Store, load_program, show
from concord.training.build import build_model
from concord.training.checkpoint import read_weights
from concord.training.job import Job, JobFile, with_recorded_rule
from concord.training.metric_names import short_metrics
from concord.training.options import RunConfig, TrainConfig
from concord.training.rule_file import RuleFile


@dataclass(frozen=True)
class TrainedModel:
    """The trained model of a run.

    Attributes:
        model: on the CPU.
    """

    name: str
    run_id: str
    job: JobFile
    config: TrainConfig
    model: nn.Module
    metrics: Mapping[str, float]


def last_model(job: Job[Any], config: RunConfig, run: Run) -> nn.Module | None:
    """The model with a run's last weights, in evaluation mode; None without a checkpoint or a model."""
    checkpoint = kept_checkpoint(run)
    if not job.has_model or checkpoint is None:
        return None
    model = build_model(job, config)
    read_weights(run.folder.fetch(f"{CHECKPOINTS}/{checkpoint}"), model)
    return model.eval()


def model_of_run(job: JobFile, output: Path, name: str, data: Path | None = None) -> TrainedModel:
    """The model of a run's last checkpoint; ``data`` is the folder of the data, if not the run's."""
    folder = folder_of(output, name)
    run = require_run(folder)
    record = run.record
    if record["job"] != job.name:
        raise InputError(f"--name {name}: is a run of job {record['job']}, not of {job.name}")
    again = job.command("train", options={"name": name, "resume": True})
    if run.status != "FINISHED" or run.run_id is None:
        raise InputError(f"--name {name}: is not finished; run {again}")
    recorded = {**record["config"], "output": str(output)}  # it may have been moved
    job, config = _configured(job, recorded, record.get("sources", {}), data)
    model = last_model(job.job, config, run)
    if model is None:
        raise InputError(f"--name {name}: has no checkpoint in {folder.display_path}; {again} makes one")
    return TrainedModel(name, run.run_id, job, config, model, short_metrics(run.metrics))


def model_of_version(job: JobFile, store: Store, reference: str, data: Path | None = None) -> TrainedModel:
    """The model of a registered version, ``NAME@ALIAS`` or ``NAME/VERSION``; the run's files are not needed."""
    name, _, which = reference.replace("/", "@", 1).partition("@")
    if not name or not which:
        raise InputError(f"--model {reference}: give NAME@champion, or NAME/VERSION")
    version = show(store, name, which)
    of = store.run(version.run_id).tags.get("concord.job") if version.run_id is not None else None
    if version.run_id is None or of != job.name:
        raise InputError(f"--model {reference}: is of {'job ' + of if of else 'no run'}, not of job {job.name}")
    recorded = store.read_json(version.run_id, "config.json")
    if recorded is None:
        raise InputError(f"--model {reference}: its run {version.run} has no config.json in {store.uri}")
    job, config = _configured(job, recorded, {}, data)
    return TrainedModel(
        version.run or version.uri, version.run_id, job, config, load_program(store, version), version.metrics
    )


def _configured(
    job: JobFile, recorded: Mapping[str, Any], sources: Mapping[str, str], data: Path | None
) -> tuple[JobFile, TrainConfig]:
    """The options of a run, and the job with the user's own rule if the run had one."""
    values, rule = dict(recorded), str(recorded.get("aggregator"))
    if RuleFile.is_reference(rule) and RuleFile.parts(rule)[0] not in sources:
        del values["aggregator"]  # losses do not depend on it
    job = with_recorded_rule(job, values.get("aggregator"), sources)
    config = restored_config(job.job.config, values)
    return job, config if data is None else config.with_options(data=data)
