"""What becomes of a run that has trained: figures, data and model in MLflow, a version in the registry, advice."""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from concord.environments import Environments
from concord.environments.summary import DataSummary
from concord.errors import InputError, RunFailedError
from concord.execution.execute import CHECKPOINTS
from concord.execution.lifecycle import Info, send_again
from concord.execution.model_card import model_card, result_lines
from concord.execution.patience import wait_for_answer
from concord.execution.preflight import PreflightResult, preflight, required
from concord.execution.spec import JOB
from concord.execution.tested_rows import intervals_of_test
from concord.execution.trained_model import last_model, model_of_run
from concord.record import OpenRun, Run
from concord.source_file import reason
from concord.tracking import ExportError, Registered, Store, log_model, register
from concord.tracking.datasets import log_data
from concord.tracking.registry import STUDY, deleted_version
from concord.training.advice import advice
from concord.training.checkpoint import MODEL
from concord.training.job import Job, JobFile
from concord.training.metric_names import environments_of, short_metrics
from concord.training.options import ResolvedConfig, ResolvedTrainConfig, in_short

# MLflow's folder for the weights of a model that is not exported, and the line about it.
_WEIGHTS = "weights"
_NOT_CALLED = "the job's risk does not call it as a function of tensors"
FIGURES, _METRICS = "figures", "metrics.json"
_NAMED = 8  # more environments of a score are counted


def finish(
    job: JobFile,
    config: ResolvedConfig,
    run: OpenRun,
    store: Store,
    checked: PreflightResult,
    info: Info,
    started: float | None,
    lineage: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Draw the figures of a trained run, keep data and model in MLflow, and tell what may help.

    Returns the fields of the run's end: its ``report``, or ``untracked`` if MLflow did not take all, which ``--resume``
    tries again. The report's seconds are since ``started``; ``lineage`` says, as tags do, of which study the run is
    the best trial.
    """
    run_id = str(run.run_id)
    metrics = short_metrics(run.metrics)
    run.folder.write(_METRICS, json.dumps(run.metrics, indent=1))
    model = last_model(job.job, config, run)
    for path in _draw(job, config, run, model, info):
        run.keep_artifact(f"{FIGURES}/{path.name}")
    uri: str | None = None
    registered = None
    tracked = False
    environments = checked.environments
    lines = [*advice(job.job, config, run.history, environments, checked.measures)]
    warnings = list(lines)
    patient = partial(wait_for_answer, minutes=config.run.tracking_patience)
    try:
        patient(store.require_answer)
        if run.data:
            patient(partial(log_data, store, run_id, [DataSummary.read(part) for part in run.data]))
        reason = _NOT_CALLED
        if model is not None and checked.example is not None:
            try:
                about = (environments.raw, environments.classes, job.model_name(config))
                key = run.record["tracking"].get("key")  # none of an earlier version
                uri = patient(partial(log_model, store, run_id, model, checked.example, *about, key=key))
            except ExportError as error:
                reason = str(error)
        if model is not None and uri is None:
            weights = run.folder.path / CHECKPOINTS / run.checkpoints[-1] / MODEL
            patient(partial(store.log_files, run_id, weights, _WEIGHTS))
            line = f"the model is not registered: {reason}; its weights are the run's artifact {_WEIGHTS}/{MODEL}"
            warnings.append(line)
            info(line)
        if uri is not None and not config.run.register:
            model_id = uri.removeprefix("models:/")
            patient(partial(store.log_metrics, run_id, metrics, run.steps, run.evaluated_at, model_id))
        elif uri is not None:
            registered = patient(partial(_register, job, config, run, store, uri, checked, lines, lineage))
            uri = f"models:/{registered.name}/{registered.version}"
        tracked = True
    except (RunFailedError, InputError) as error:  # the training is finished
        info(f"the model could not be kept in MLflow: {error}; --resume tries again")
    if model is not None and environments.test and environments.raw is not None:
        named = next((name for name in ("accuracy", "mse") if name in checked.measures), None)
        lines += filter(None, [named and intervals_of_test(environments, model, named, run.metrics)])
    for line in lines:
        info(line)
    registration = registered.reason if registered else None
    run.append("note", part="result", text=result_lines(run, checked, warnings, registration, uri))
    report = {
        "job": job.name,
        "name": run.name,
        "run_id": run_id,
        "seconds": 0.0 if started is None else round(time.perf_counter() - started, 3),
        "model": uri if registered or not config.run.register else None,
        "champion": registered.champion if registered else False,
        "registration": registration,
        "artifacts": run.folder.display_path,
        "metrics": metrics,
    }
    return {"report" if tracked else "untracked": report}


def _register(
    job: JobFile,
    config: ResolvedConfig,
    run: Run,
    store: Store,
    uri: str,
    checked: PreflightResult,
    warnings: Sequence[str],
    lineage: Mapping[str, str] = MappingProxyType({}),
) -> Registered:
    """Register a run's model in MLflow, to be compared with other versions."""
    (criterion, mode), run_id, metrics = checked.criterion, str(run.run_id), short_metrics(run.metrics)
    if criterion not in metrics:
        raise RunFailedError(f"the run does not report {criterion}, by which versions are compared")
    lineage = {**run.record["tracking"]["tags"], **lineage}
    unfit, scored = shortfall(job.job, config, metrics), scored_on(criterion, checked.environments)
    store.set_tag(run_id, JOB, job.name)
    return register(
        store,
        uri,
        run_id,
        job.model_name(config),
        metrics,
        criterion,
        mode,
        unfit,
        scored,
        study=lineage.get(STUDY),
        card=partial(model_card, job, config, run, checked, lineage, warnings, store),
        step=run.steps,
        at=run.evaluated_at,
    )


def register_later(job: JobFile, run: Run, tracking_uri: str | None = None) -> str:
    """Register the model of a run that is finished, if it is not registered; return the version's URI (InputError if
    it has no model in MLflow)."""
    report = run.report
    if report is None or report["model"] is None:
        raise InputError(f"run {run.name}: has no model in MLflow to register")
    store = Store.open(run.output, tracking_uri)
    if report["registration"] is not None:
        if gone := deleted_version(store, report["model"]):
            raise InputError(f"run {run.name}: its version {gone}; register it there, by mlflow.register_model")
        return str(report["model"])
    trained = model_of_run(job, run.output, run.name)
    config = trained.config.resolve()
    checked = preflight(trained.job, config)
    lines = [*advice(trained.job.job, config, run.history, checked.environments, checked.measures)]
    registered = _register(trained.job, config, run, store, report["model"], checked, lines)
    uri = f"models:/{registered.name}/{registered.version}"
    again = {**report, "model": uri, "champion": registered.champion, "registration": registered.reason}
    with run.folder.locked("run"):
        with contextlib.closing(OpenRun(run.folder, run.record)) as opened:
            opened.append("ended", status="FINISHED", report=again)
            opened.sync()
        send_again(opened, store)
    return uri


def figures_of(job: JobFile, run: Run, info: Info) -> dict[str, Any]:
    """The figures of a finished run, by name: matplotlib's, or the frames of a moving picture."""
    trained = model_of_run(job, run.output, run.name)
    return _figures(trained.job, trained.config.resolve(), run, trained.model, info)


def _draw(job: JobFile, config: ResolvedConfig, run: Run, model: torch.nn.Module | None, info: Info) -> list[Path]:
    """Write the figures of a run into its folder; return the files."""
    drawn = _figures(job, config, run, model, info)
    if not drawn:
        return []
    from concord.analysis.figures import save
    from concord.analysis.trajectory_figures import moving_picture

    return [
        moving_picture(figure, run.folder.path / FIGURES / f"{name}.gif")
        if isinstance(figure, torch.Tensor)
        else save(figure, run.folder.path / FIGURES / f"{name}.png")
        for name, figure in drawn.items()
    ]


def _figures(
    job: JobFile, config: ResolvedConfig, run: Run, model: torch.nn.Module | None, info: Info
) -> dict[str, Any]:
    """The figures of every run of the platform's loop, and the job's own, by name."""
    if job.job.loop is not None and job.job.figures is None:
        return {}
    from concord.analysis.training_curves import training_curves

    measure = "accuracy" if "train_accuracy" in run.metrics else "loss"
    drawn = {"curves": training_curves(run.history, measure)} if job.job.loop is None else {}
    if job.job.figures is not None and model is not None:
        try:
            drawn |= job.job.figures(job.job, config, run, model)
        except Exception as error:  # the user's code; the training is kept
            info(f"the job's figures could not be drawn ({reason(error, job.path)})")
    return drawn


def shortfall(job: Job[Any], config: ResolvedConfig, metrics: Mapping[str, float]) -> str | None:
    """Why a run cannot be the champion, in words: the requirement of the job that it misses; None if it can.

    A run with environments left out is measured on them, so it is not compared with runs on all.
    """
    if isinstance(config, ResolvedTrainConfig) and config.data.left_out:
        were = "were" if len(config.data.left_out) > 1 else "was"
        return f"{in_short(config.data.leave_out)} {were} left out of its training; promote it by hand"
    for name, least in required(job, config).items():
        value = metrics.get(name, math.nan)
        if not value >= least:  # so that NaN falls short
            return f"{name} {value:g} is below {least:g}, which the job requires of a champion"
    return None


def scored_on(criterion: str, environments: Environments) -> str | None:
    """The environments in which a criterion is measured, as text that differs when they do; None if it has none.

    Scores in different environments cannot be compared: a test that takes the hardest hospital leaves easier ones.
    """
    names = sorted(environments_of(criterion, environments))
    if len(names) <= _NAMED:
        return ", ".join(names) or None
    return f"{len(names)} environments ({hashlib.sha256(repr(names).encode()).hexdigest()[:8]})"
