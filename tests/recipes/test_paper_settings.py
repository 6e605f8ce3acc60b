"""The jobs' settings and search spaces are those of the papers' tables."""

from typing import Any

import pytest
from torch import nn

from concord.options import option_values
from concord.space import Choice, OneOf
from concord.training import load_job
from concord_jobs.distill_mujoco.job import objective
from concord_jobs.distill_mujoco.tables import SETTINGS
from concord_jobs.distill_mujoco.teacher import TrajectoryTeacher


def ranges(job: str, method: str) -> dict[str, tuple[Any, ...]]:
    entries = load_job(job).job.studies[method].space.entries
    return {name: entry.values for name, entry in entries.items() if isinstance(entry, Choice)}


def settings(job: str, method: str) -> dict[str, Any]:
    (found,) = load_job(job).job.studies[method].suggestions
    return dict(found)


def test_the_studies_of_synthetic_search_the_papers_ranges() -> None:
    """Tables 1 and 2; IRM's annealing iterations are epochs of the paper's 94 there, and fractions of a run here."""
    both = {
        "hidden_units": (256, 512),
        "hidden_layers": (3, 5),
        "batch_size": (64, 128, 256),
        "optimizer": ("adam", "sgd"),
    }
    rates, penalties = (1e-3, 1e-2, 1e-1), {"l1": (1e-6, 1e-5, 1e-4), "l2": (1e-5, 1e-4, 1e-3)}
    masked = ranges("synthetic", "and-mask")
    assert masked.items() >= {**both, "lr": rates, "batch_norm": (True, False), "dropout": (0.0, 0.5)}.items()
    regularizer = load_job("synthetic").job.studies["and-mask"].space.entries["regularizer"]
    assert isinstance(regularizer, OneOf)
    for name, values in penalties.items():
        assert regularizer.branches[name][name] == Choice(*values)
        assert ranges("synthetic", name) == {**both, "lr": rates, name: values}
    irm = ranges("synthetic", "irm")
    assert [round(94 * share) for share in irm.pop("penalty_warmup")] == [0, 1, 2, 4, 8]
    weights = {"penalty_weight": (10.0, 100.0, 1000.0), "lr": (*rates, 1.0), "batch_norm": (True, False)}
    assert irm == {**both, **weights}


def test_the_box_tasks_begin_with_what_the_thesis_found() -> None:
    """Tables A.1 and A.2: rate, steps to its decay, network and its width; horizon and exploration."""
    found = {
        ("room-runner", "asi"): (5e-4, 15_000, "strided", 48, 21, 7500),
        ("room-runner", "asi-no-exploration"): (5e-4, 15_000, "plain", 48, 18),
        ("room-runner", "fixed-1"): (5e-4, 15_000, "plain", 48),
        ("room-runner", "fixed-2"): (5e-4, 15_000, "plain", 48),
        ("funnel-board", "asi"): (5e-4, 15_000, "dilated", 48, 21, 15_000),
        ("funnel-board", "asi-no-exploration"): (7.5e-4, 10_000, "strided", 32, 18),
        ("funnel-board", "fixed-1"): (7.5e-4, 15_000, "dilated", 32),
        ("funnel-board", "fixed-2"): (7.5e-4, 15_000, "strided", 32),
    }
    names = ("lr", "lr_decay_steps", "architecture", "kernels", "horizon", "exploration_steps")
    for place, values in found.items():
        assert settings(*place) == dict(zip(names, values, strict=False)), place


def test_the_distillation_jobs_have_the_settings_of_the_thesis() -> None:
    """Tables C.1, C.5 and C.6."""
    logits = option_values(load_job("distill-logits").job.config)
    assert logits.items() >= {
        "optimizer": "adam", "lr": 1e-3, "batch_size": 32, "meta_lr": 1e-3, "teaching_weight": 1e4,
        "unrolled_steps": 64, "validation_fraction": 0.5,
    }.items()  # fmt: skip
    config: Any = load_job("distill-mujoco").job.config
    returns = option_values(config)
    assert returns.items() >= {
        "meta_lr": 5e-4, "lr": 1e-3, "batch_size": 24, "unrolled_steps": 96, "student_steps": 24,
    }.items()  # fmt: skip
    learning: Any = objective(config)
    assert (learning.meta.rule.momentum, learning.meta.rule.weight_decay) == (0.75, 1e-8)
    gates = [objective(config.with_options(**given)).teaching.loss.offset for given in ({}, {"gate_offset": 1.0})]
    assert gates == [2.0, 1.0], "2 of the kept rows, 1 of the thesis"
    teacher = TrajectoryTeacher(16, 12, [1])
    convolutions = [each.out_channels for each in teacher.layers if isinstance(each, nn.Conv1d)]
    assert (convolutions, teacher.head.in_features) == ([96, 96, 96, 256], 768)
    # Table C.5: β₁, rate of the copies, logarithm of the teaching weight, share of the split.
    best = {
        "Swimmer": (0.9, 1e-2, 10**2.5, 0.3),
        "Walker2d": (0.9, 1e-2, 10**3.0, 0.5),
        "Hopper": (0.0, 1e-2, 10**2.5, 0.3),
        "HalfCheetah": (0.0, 1e-2, 10**2.5, 0.7),
    }
    for simulator, values in best.items():
        chosen = {**returns, **SETTINGS[simulator]}
        names = ("meta_beta1", "unrolled_lr", "teaching_weight", "validation_fraction")
        assert tuple(chosen[name] for name in names) == pytest.approx(values), simulator


def test_the_studies_of_returns_search_the_thesis_ranges() -> None:
    """Tables C.2 to C.4; the base of the teaching weight's logarithm is taken to be 10."""
    alone = {"lr": (1e-3, 1e-2), "l2": (0.0, 1e-5, 1e-4)}
    assert ranges("distill-mujoco", "none") == {**alone, "batch_size": (8, 16, 32)}
    assert ranges("distill-mujoco", "predicting") == {**alone, "auxiliary_weight": (1.0, 2.0, 4.0)}
    assert ranges("distill-mujoco", "ldt") == {
        "meta_beta1": (0.0, 0.9),
        "unrolled_lr": (1e-3, 5e-3, 1e-2),
        "teaching_weight": pytest.approx((10**2.0, 10**2.5, 10**3.0)),
        "validation_fraction": (0.3, 0.5, 0.7),
    }
