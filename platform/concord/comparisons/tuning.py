"""Tunes each method with a study of its own, and compares them. What ``concord compare JOB methods`` does."""

import shlex
import time
from collections.abc import Sequence

from concord.comparisons.methods import MethodsPlan
from concord.comparisons.plan import METHODS
from concord.comparisons.recommendation import MethodsResult
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import RunFailedError, StoppedError
from concord.job_files import built_in_jobs
from concord.options import as_words, option_values
from concord.redaction import is_secret, redact
from concord.runs.run import Info
from concord.runs.session import ray_session
from concord.runs.termination import sigterm_as_interrupt
from concord.storage import resolve
from concord.studies.results import StudyResult
from concord.studies.spaces import config_at
from concord.studies.study import run_study


def run_methods(plan: MethodsPlan, words: Sequence[str], info: Info) -> MethodsResult:
    """Run the studies one after another, or go on with them.

    Args:
        plan: what is wanted.
        words: the command's options, to say how to continue.
        info: takes a line of progress.

    Raises:
        InputError: something cannot be used.
        RunFailedError: it was stopped, or fewer than two methods have a result; what was finished is kept.
    """
    started = time.perf_counter()
    found: dict[str, StudyResult] = {}
    failed: dict[str, str] = {}
    for method, reason in plan.left_out.items():
        info(f"{method} is left out: {reason}")
    try:
        with sigterm_as_interrupt(), ray_session(plan.base):
            for method, study in plan.studies.items():
                try:
                    found[method] = run_study(study, info)
                except StoppedError:
                    raise
                except RunFailedError as error:
                    failed[method] = str(error)
                    info(f"{method}: {error}")
    except (StoppedError, KeyboardInterrupt):
        job = plan.job.name if plan.job.name in built_in_jobs() else plan.job.path
        again = shlex.join(["concord", "compare", job, METHODS, *map(redact, words)])
        raise StoppedError(f"stopped; what was finished is kept; continue with {again}") from None
    if len(found) < 2:
        said = "; ".join(f"{method}: {failure.splitlines()[0]}" for method, failure in failed.items())
        raise RunFailedError(f"fewer than two methods have a result: {said}")
    return MethodsResult(plan.job.name, found, failed, plan.environments, time.perf_counter() - started)


def train_command(plan: MethodsPlan, result: MethodsResult) -> str:
    """The command that trains a model with the recommended method and its settings."""
    method = result.recommended
    of_method, study = plan.studies[method], result.studies[method]
    config = option_values(config_at(of_method.base, of_method.space, study.best[0].point))
    usual = option_values(plan.job.job.config)
    left_out = {"name", "register", "tracking_uri", "address", *(["output"] if _usual_place(plan) else [])}
    unused = config_at(of_method.base, of_method.space, study.best[0].point).resolved().unused()
    changed = {
        name: value
        for name, value in config.items()
        if value != usual[name] and name not in left_out | unused and not is_secret(name) and value is not None
    }
    job = plan.job.name if plan.job.name in built_in_jobs() else plan.job.path
    return shlex.join(["concord", "train", job, *as_words(changed)])


def _usual_place(plan: MethodsPlan) -> bool:
    return plan.base.run.output in (resolve(DEFAULT_OUTPUT), DEFAULT_OUTPUT)
