"""A whole run (``concord train``): check, say what will be done, train, record, finish."""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any

from concord.aggregation import SandMask, SignMask, TMask
from concord.environments import Environments
from concord.errors import TrainingFailedError
from concord.execution.execute import (
    RunTask,
    execute,
    kept_checkpoint,
    last_checkpoint,
    needs_ray_train,
    remove_checkpoints,
    remove_older,
)
from concord.execution.finish import finish
from concord.execution.key import keep_source
from concord.execution.lifecycle import ActiveRun, Info, open_run, reserved_run, send_again
from concord.execution.preflight import PreflightResult, preflight, required
from concord.execution.progress import RunProgress
from concord.execution.session import check_cluster, ray_session, require_resources
from concord.execution.spec import RunSpec, resolved_paths, run_tags
from concord.execution.submission.profile import described
from concord.options import flag_of, option_values, options_of
from concord.record import OpenRun, Run
from concord.redaction import redact
from concord.storage import require_space
from concord.tracking.registry import deleted_version
from concord.tracking.system_metrics import sampling_seconds
from concord.training.advice import mask_lines
from concord.training.callback import Callback
from concord.training.job import JobFile
from concord.training.options import ResolvedConfig, ResolvedTrainConfig, RunConfig, TrainConfig
from concord.training.process import tune_process


def run(
    job: JobFile, config: RunConfig, info: Info, given: Collection[str] = (), callbacks: Sequence[Callback] = ()
) -> Run:
    """Train a job, or resume it, and keep everything. After a failure ``--resume`` continues from the last checkpoint.

    Invalid input leaves nothing of the run. ``given`` has the names of the options that the user gave, of which those
    without an effect are named; ``callbacks`` are called beside the job's. The result's ``report`` is the contract of
    ``concord train --json``.
    """
    started = time.perf_counter()
    config.check()
    # Ray Train's workers have another working directory, so paths must be absolute.
    config = config.with_options(**resolved_paths(config))
    check_cluster(config)
    checked = preflight(job, config)
    spec = _spec(job, checked)
    with (
        reserved_run(spec) as active,
        RunProgress(info) as progress,
        contextlib.ExitStack() as session,
    ):
        if (earlier := active.earlier) is not None and earlier.report is not None:
            if any(each.part == "source" for each in spec.key.differences(earlier.record)):
                info("warning: the job has changed since; what the run learned with the earlier text is kept")
            finished, unsent = send_again(earlier, active.store)
            info(f"run {finished.name} is finished" + (f"; {unsent} events are still not sent" if unsent else ""))
            if gone := deleted_version(active.store, earlier.report["model"]):
                info(f"its version {gone}")
                report = {**earlier.report, "model": None, "champion": False, "registration": None}
                finished.ended = {**(finished.ended or {}), "report": report}  # the record keeps its own
            return finished
        config = spec.config.with_options(name=active.name)
        require_space(active.folder.path)
        dashboard = None
        if needs_ray_train(config) or (job.job.loop is not None and job.job.loop.uses_ray):
            progress.waiting("starting Ray")
            dashboard = session.enter_context(ray_session(config))
            require_resources(config, info)
        with open_run(active, spec.record(active.store), info):
            keep_source(job, active.run)
            for line in run_summary(job, config, active, checked, given):
                info(line)
            beginning = _method_and_data(job, config, active.name, checked, given)
            active.run.append("note", part="beginning", text=_as_note(job, active.name, beginning))
            if idle := sorted(map(flag_of, config.unused() & {*given})):
                info(f"warning: {', '.join(idle)}: of no effect in this run; another objective, rule or option uses it")
            if dashboard:
                info(f"Ray dashboard {described(dashboard)}")
            progress.training(job.epochs(config), "starting workers" if needs_ray_train(config) else "loading data")
            _train(job, config, active.run, progress, info, callbacks)
            session.close()  # Ray's processes are not needed for the rest
            progress.waiting("drawing figures, registering the model")
            active.report = finish(job, config, active.run, active.store, checked, info, started)
    return active.run


def _spec(job: JobFile, checked: PreflightResult) -> RunSpec:
    """What a run is, from its checks."""
    environments = checked.environments
    spec = RunSpec.of(job, checked.config, environments.version)
    derived: dict[str, object] = {} if checked.objective is None else {"objective": checked.objective}
    if isinstance(spec.config, ResolvedTrainConfig):
        derived |= mask_parameters(spec.config, len(environments.train))
    return dataclasses.replace(
        spec,
        parameters={**spec.parameters, **derived},
        tags=run_tags(job.name, job.path, len(environments.train) or None, environments.version),
        artifacts={"environments.json": environments.by_purpose()} if environments.train else {},
    )


def _train(
    job: JobFile,
    config: ResolvedConfig,
    run: OpenRun,
    progress: RunProgress,
    info: Info,
    callbacks: Sequence[Callback],
) -> None:
    """Train from the last checkpoint on, and record everything."""
    start = None
    if run.record.get("group") and kept_checkpoint(run) is None:  # the group removed it, so the run begins again
        run.append("began", resumed=False)
    else:
        start = last_checkpoint(run, info)
    remove_checkpoints(run)

    def take(name: str, /, **fields: Any) -> None:
        run.append(name, **fields)
        if name == "metrics":
            progress.show(fields["metrics"])
        elif name == "checkpoint":
            run.sync()
            remove_older(run)

    on_ray_train = needs_ray_train(config)
    if not on_ray_train:
        tune_process()
    task = RunTask(
        job.sent,
        option_values(config),
        run.folder,
        on_ray_train,
        callbacks=tuple(callbacks) if on_ray_train else (*callbacks, progress),
        system_seconds=sampling_seconds(),
    )
    with contextlib.closing(execute(task, job, take, start)) as evaluations:
        try:
            for evaluation in evaluations:
                progress.show({**evaluation.metrics, "epoch": float(evaluation.epoch)})
        except TrainingFailedError as error:
            if error.traceback:
                info(error.traceback)
            raise
    if not run.evaluations:
        raise TrainingFailedError(f"the loop of job {job.name} gave no evaluation")


def run_summary(
    job: JobFile, config: ResolvedConfig, active: ActiveRun, checked: PreflightResult, given: Collection[str]
) -> list[str]:
    """The first lines of a run; ``given`` has the names of the options that the user gave."""
    champion = "champion: none is selected, since the model is not registered"
    if config.run.register and checked.example is not None:
        metric, mode = checked.criterion
        size = "largest" if mode == "max" else "smallest"
        least = "".join(f", with {name} of at least {value:.4g}" for name, value in required(job.job, config).items())
        champion = f"champion: the version with the {size} {metric}{least}"
    return [
        *_method_and_data(job, config, active.name, checked, given),
        champion,
        f"kept in {active.folder.display_path}, tracked in {redact(active.store.uri)}",
    ]


def _as_note(job: JobFile, name: str, lines: Sequence[str]) -> str:
    """The first lines of a run as the beginning of its description: the method, the data, what to expect of a mask."""
    first, *others = lines
    return "  \n".join([f"**{job.name}**: {first.removeprefix(f'run {name}: ')}", *map(redact, others)])


def _method_and_data(
    job: JobFile, config: ResolvedConfig, name: str, checked: PreflightResult, given: Collection[str]
) -> list[str]:
    if not isinstance(config, ResolvedTrainConfig):
        opening = job.job.loop.opening if job.job.loop is not None else None
        method, *data = opening(config) if opening is not None else [config.method or job.name]
        return [f"run {name}: {method}", *data]
    method, environments = config.method, checked.environments
    if checked.objective is not None:
        method = checked.objective if method == "mean" else f"{checked.objective}-{method}"
    on_ray = " on Ray Train" if needs_ray_train(config) else ""
    on_gpu = ", on CUDA" if config.parallel.device == "cuda" else ""
    return [
        f"run {name}: {method}, {_count(config.parallel.workers, 'worker')}{on_ray}{on_gpu}",
        f"data: {_purposes(environments, config.data.held_out)}",
        *mask_lines(config, len(environments.train), methods_command(job, config, given)),
    ]


def _purposes(environments: Environments, held_out: float) -> str:
    """The numbers of environments for training (a part held out), validation and test."""
    part = f" ({held_out:.3g} of each held out)" if held_out and not environments.held_out else ""
    data = [f"{_count(len(environments.train), 'environment')} for training{part}"]
    data += [f"{len(environments.held_out)} held out whole"] if environments.held_out else []
    data += [f"{len(environments.validation)} for validation"] if environments.validation else []
    data += [f"{len(environments.test)} for test"] if environments.test else []
    return ", ".join(data)


def methods_command(job: JobFile, config: TrainConfig, given: Collection[str] = ()) -> str:
    """The command that compares methods on the data of a run: with the given options that say which data they are."""
    common = options_of(TrainConfig).keys() - {"data"}
    asked = {name: value for name, value in option_values(config).items() if name in {*given} - common}
    values = {name: value for name, value in asked.items() if value != config.baseline}  # which is compared in any case
    return job.command("compare", "methods", options=values)


def mask_parameters(config: ResolvedTrainConfig, environments: int) -> dict[str, float]:
    """The derived parameters of a run for MLflow, from its options and its number of training environments.

    ``chance_fraction`` is the fraction of components that the mask keeps if signs are independent and fair; without
    ``--threshold`` the result has the derived ``threshold`` as well.
    """
    given, rule, derived = config.aggregation, config.rule(environments), dict[str, float]()
    if given.own_rule is None and isinstance(rule, SignMask | TMask):
        derived["chance_fraction"] = rule.chance(config.num_gradients(environments))
    derives = given.threshold is None or given.significance is not None
    if given.own_rule is None and derives and isinstance(rule, SignMask | SandMask):
        derived["threshold"] = rule.threshold
    if given.own_rule is None and isinstance(rule, TMask):
        derived["significance"] = rule.significance
    return derived


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
