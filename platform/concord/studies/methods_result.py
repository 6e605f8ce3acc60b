"""A comparison of methods that is there: its result, and the commands behind it, from the studies' records."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.execution.restored_options import restored_config
from concord.options import option_values, options_of
from concord.record import Run
from concord.studies.comparison_plan import comparison_name, train_command
from concord.studies.job_tables import METHODS
from concord.studies.recommendation import MethodsResult
from concord.studies.results import StudyResult, read_studies
from concord.studies.search import config_at
from concord.training import JobFile, RunConfig
from concord.training.job import with_recorded_rule
from concord.training.rule_file import RuleFile


def methods_result(
    job: JobFile, studies: Mapping[str, StudyResult], failed: Mapping[str, str], seconds: float = 0.0
) -> MethodsResult:
    """The result of studies that have one, by method; ``failed`` are the others, with the reasons."""
    first = next(iter(studies.values()))
    seed, seeds = first.record["config"]["seed"], first.record["options"]["reruns"]
    result = MethodsResult(
        job.name,
        studies,
        failed,
        environments=min(_environments(run) for study in studies.values() for run in study.best.runs),
        seeds=range(seed + 1, seed + 1 + seeds),
        seconds=seconds,
        baselines=[method for method in studies if method in job.job.baselines],
    )
    return dataclasses.replace(result, train=train_method(job, result.recommended, studies[result.recommended]))


def read_methods(job: JobFile, output: Path, name: str | None) -> MethodsResult | None:
    """The comparison of methods of this name, by default the job's; None if fewer than two methods have a result."""
    group = name or methods_name(job)
    studies = read_studies(output, job.name, f"{group}-*")  # also of comparisons whose names begin so
    found = {each.method: each for each in studies if each.folder.path.name == study_name(group, each.method)}
    failed = {method: "none of its trials has finished" for method, study in found.items() if not study.finished}
    finished = {method: study for method, study in found.items() if method not in failed}
    return methods_result(job, finished, failed) if len(finished) > 1 else None


def methods_name(job: JobFile) -> str:
    """The name of the job's comparison of methods, without another one given."""
    return f"{comparison_name(job.name, None)}-{METHODS}"


def study_name(group: str, method: str) -> str:
    """The name of a method's study."""
    return f"{group}-{comparison_name(method, None)}"


def options_of_study(job: JobFile, study: StudyResult) -> RunConfig:
    """The options that a study's trials start from, with those of the user's own rule."""
    record = study.record
    job = with_recorded_rule(job, record["config"].get("aggregator"), record.get("sources", {}))
    config: RunConfig = restored_config(job.job.config, record["config"])
    return config.with_options(output=study.folder.place.parent.parent)


def train_method(job: JobFile, method: str, study: StudyResult) -> str:
    """The command that trains and registers a method with its best settings."""
    config = config_at(options_of_study(job, study), study.space, study.best.point)
    return train_command(job, config, {"aggregator": method} if RuleFile.is_reference(method) else {})


def compare_command(job: JobFile, result: MethodsResult, more: Mapping[str, Any]) -> str:
    """The command that repeats a comparison, with the options of its first study, and more."""
    first = next(iter(result.studies.values()))
    config, asked = option_values(options_of_study(job, first)), first.record["options"]
    methods = tuple(method for method in (*result.studies, *result.failed) if method not in result.baselines)
    given = {name: config[name] for name in first.record["given"] if name in options_of(type(job.job.config))}
    of_studies = {name: asked[name] for name in ("selection", "metric", "mode", "folds", "drawn") if asked[name]}
    options = {"methods": methods, "trials": asked["trials"], "seeds": asked["reruns"], **of_studies, **given, **more}
    if job.job.baselines and not result.baselines:
        options["baselines"] = False
    return job.command("compare", METHODS, options={**options, "output": config["output"]})


def _environments(run: Run) -> int:
    """The number of environments on which a run trained."""
    return sum(part["purpose"] == "train" for part in run.data)
