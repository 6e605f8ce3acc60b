"""Threads wait briefly in commands and in the processes that Concord starts, and are as many as the user allows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_job import made_job

import concord
from concord.openmp import threads_of_user

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SHARED = {"GOMP_SPINCOUNT": "2000"}
SHOWN = f"print(json.dumps([{{n: v for n, v in os.environ.items() if n in {NAMES}}}, 'torch' in sys.modules]))"

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.fixture(autouse=True)
def _without_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def after(program: str, **own: str) -> list[object]:
    """The variables of a process after a program, and whether it has imported PyTorch."""
    words = [sys.executable, "-c", f"import json, os, sys, contextlib, concord\n{program}\n{SHOWN}"]
    found: list[object] = json.loads(subprocess.check_output(words, text=True, env={**os.environ, **own}))
    return found


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, SHARED),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_a_command_waits_briefly_unless_the_user_says_how(own: dict[str, str], expected: dict[str, str]) -> None:
    command = (
        "from concord.cli import entry\nsys.argv = ['concord', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None): entry()"
    )
    assert after(command, **own) == [expected, False]


def test_an_import_leaves_the_variables_of_a_user_s_program() -> None:
    assert after("concord.train, concord.tune, concord.Job") == [{}, True]


@pytest.mark.parametrize(
    ("value", "env_vars", "expected"),
    [
        (None, None, None),
        ("3", None, 3),
        ("4,2", None, 4),
        ("0", None, None),
        ("all", None, None),
        ("1", {}, None),  # of Ray, in a job
        ("1", {"OMP_NUM_THREADS": "6"}, 6),
    ],
)
def test_the_user_s_limit_of_threads_is_told_from_ray_s(
    monkeypatch: pytest.MonkeyPatch, value: str | None, env_vars: dict[str, str] | None, expected: int | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    if env_vars is not None:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"env_vars": env_vars}}))
    assert threads_of_user() == expected


def spins(*_: object) -> dict[str, float]:
    return {"spins": float(os.environ.get("GOMP_SPINCOUNT", 0)), "threads": float(torch.get_num_threads())}


@pytest.mark.slow
def test_workers_and_trials_of_a_program_wait_briefly_and_the_program_as_before(
    ray_cluster: None, output: Path
) -> None:
    job = made_job(final_measures=spins)
    options = {"output": output, "epochs": 1, "register": False}
    assert concord.train(job, name="here", **options).metrics["spins"] == 0
    workers = concord.train(job, name="workers", workers=2, **options)
    study = concord.tune(job, trials=1, vary=["lr=0.1,0.2"], shortlist=0, reruns=0, **options)
    for metrics in (workers.metrics, study.best.metrics):
        assert (metrics["spins"], metrics["threads"]) == (2000, 1)  # OMP_NUM_THREADS is 1 in all tests
    assert not {*NAMES} & {*os.environ}
