"""The device of a run: what ``auto`` stands for, and what is asked of Ray for it."""

from pathlib import Path
from typing import Any

import pytest

from concord.execution.execute import only_process
from concord.execution.restored_options import restored_config
from concord.training import TrainConfig
from concord.training.options import RunConfig, device_of


@pytest.mark.parametrize(
    ("gpus", "options", "device"),
    [
        (0, {}, "cpu"),
        (1, {}, "cuda"),
        (1, {"device": "cpu"}, "cpu"),
        (0, {"device": "cuda"}, "cuda"),  # and is then refused by preflight
        (2, {"workers": 2}, "cuda"),
        (1, {"workers": 2}, "cpu"),
        (1, {"workers": 2, "min_workers": 1}, "cuda"),
        (8, {"address": "10.0.0.1:6379"}, "cpu"),
        (8, {"address": "10.0.0.1:6379", "device": "cuda"}, "cuda"),
        (8, {"address": "local"}, "cuda"),
    ],
)
def test_auto_is_cuda_where_this_machine_has_a_gpu_for_each_worker(
    gpus: int, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = TrainConfig().with_options(**options)
    assert device_of(config) == config.resolve().parallel.device == device
    assert config.gpu_request()[0] == (config.parallel.least_workers if device == "cuda" else 0)


def test_on_a_cluster_of_the_environment_gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert device_of(TrainConfig()) == "cpu"
    assert device_of(TrainConfig().with_options(device="cuda")) == "cuda"


def test_a_resolved_device_stays_where_the_machine_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    resolved = TrainConfig().resolve()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert only_process(resolved).device.type == "cuda"


def test_a_loop_of_the_jobs_own_has_the_cpus_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert only_process(RunConfig()).device.type == "cpu"


def test_options_that_are_gone_are_left_out_of_a_record() -> None:
    recorded = {"seed": 3, "use_gpu": True, "data_dir": "there", "data": "here"}
    config = restored_config(TrainConfig(), recorded)
    assert (config.run.seed, config.parallel.device, config.data.data) == (3, "auto", Path("here"))
