"""Whole environments held out of training: which they are, that they train nothing, and what they choose."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from concord.environments import Environments
from concord.errors import InputError
from concord.execution.preflight import preflight
from concord.training import Evaluation, Job, JobFile, ProcessContext, Silent, TrainConfig
from concord.training.loop import training
from concord.training.worker_data import prepare

NAMES = tuple(f"school {number}" for number in range(12))
NONE: Mapping[str, float] = {}


def schools(given: tuple[str, ...] = NAMES, moved: Mapping[str, float] = NONE, **purposes: Any) -> Environments:
    """Schools with a slope of their own; of some the targets are moved."""

    def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        inputs = torch.randn(20, 3, generator=generator)
        noise = torch.randn(20, 1, generator=generator)
        return inputs, inputs[:, :1] + torch.randn((), generator=generator) * inputs[:, 1:2] + noise + moved.get(
            name, 0
        )

    named = {name for names in purposes.values() for name in names}
    return Environments(load, [name for name in given if name not in named], **purposes)


def job(environments: Environments) -> Job[TrainConfig]:
    return Job(lambda _: environments, lambda _: torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, name="schools")


CONFIG = TrainConfig().with_options(epochs=4, evaluations=4, lr=0.1, held_out_environments=0.25, schedule="constant")


def held_out(environments: Environments, **changes: Any) -> tuple[str, ...]:
    return job(environments).environments_of(CONFIG.with_options(**changes)).held_out


def history(environments: Environments, **changes: Any) -> list[Evaluation]:
    config = CONFIG.with_options(**changes).resolve()
    return list(training(job(environments), config, ProcessContext(), Silent()))


@given(st.permutations(NAMES), st.integers(0, 5))
def test_seed_and_names_alone_choose_them(order: list[str], seed: int) -> None:
    found = held_out(schools(tuple(order)), seed=seed)
    assert set(found) == set(held_out(schools(), seed=seed))
    assert len(found) == 3


def test_another_seed_holds_out_others() -> None:
    assert len({held_out(schools(), seed=seed) for seed in range(5)}) > 1


def test_the_others_are_trained_on_whole_and_none_of_them_is_held_out() -> None:
    prepared = prepare(job(schools()), CONFIG.resolve(), ProcessContext())
    apart = prepared.environments.held_out
    assert [pair.training.name for pair in prepared.training] == [name for name in NAMES if name not in apart]
    assert all(len(pair.training) == 20 and pair.held_out is None for pair in prepared.training)
    assert tuple(name for name, _ in prepared.eval_only) == apart
    end = history(schools())[-1].metrics
    assert {name for name in end if name.startswith("loss/held_out/")} == {f"loss/held_out/{name}" for name in apart}
    assert end["validation_loss"] == end["held_out_loss"]


def test_one_that_the_job_holds_out_can_be_left_out_and_none_is_lost() -> None:
    environments = schools(held_out=NAMES[:2])
    fewer = job(environments).environments_of(CONFIG.with_options(leave_out=NAMES[:1]))
    assert (fewer.train, fewer.held_out, fewer.validation) == (NAMES[2:], NAMES[1:2], NAMES[:1])
    assert job(environments).environments_of(CONFIG).by_purpose() == environments.by_purpose()
    (*_, end) = history(environments, leave_out=NAMES[:1])
    assert end.metrics["held_out_loss"] == end.metrics[f"loss/held_out/{NAMES[1]}"]


@pytest.mark.parametrize(
    ("environments", "changes"),
    [
        (schools(NAMES[:9]), {}),
        (schools(NAMES[:1]), {}),
        (schools(validation=NAMES[:1]), {}),
        (schools(), {"held_out_environments": 0.0}),
        (schools(), {"held_out": 0.0}),
    ],
)
def test_with_few_environments_or_some_for_validation_parts_are_held_out(
    environments: Environments, changes: dict[str, Any]
) -> None:
    config = CONFIG.with_options(**changes)
    plain = prepare(job(environments), config.with_options(held_out_environments=0.0).resolve(), ProcessContext())
    found = prepare(job(environments), config.resolve(), ProcessContext())
    assert found.environments.by_purpose() == plain.environments.by_purpose()
    assert [len(pair.training) for pair in found.training] == [len(pair.training) for pair in plain.training]


@pytest.mark.parametrize("split", ["ood", "held_out"])
def test_what_is_held_out_or_the_test_gives_no_gradient(split: str) -> None:
    environments = schools(test=NAMES[:2])
    apart = environments.test if split == "ood" else held_out(environments)
    moved = schools(test=NAMES[:2], moved=dict.fromkeys(apart, 5.0))
    one, other = (history(each)[-1].metrics for each in (environments, moved))
    assert one["train_loss"] == other["train_loss"]
    assert one[f"{split}_loss"] != other[f"{split}_loss"]


def kept(environments: Environments, **changes: Any) -> tuple[float, list[Evaluation]]:
    seen = history(environments, keep="least-loss", epochs=12, evaluations=12, lr=0.5, **changes)
    return seen[-1].metrics["kept_epoch"], seen


def test_they_choose_the_weights_and_the_test_never_does() -> None:
    epoch, seen = kept(schools(test=NAMES[:2]))
    assert epoch == min(seen, key=lambda each: each.metrics["held_out_loss"]).epoch
    assert kept(schools(test=NAMES[:2], moved=dict.fromkeys(NAMES[:2], 9.0)))[0] == epoch


def test_an_environment_left_out_is_not_held_out_and_chooses_nothing() -> None:
    environments = schools()
    left_out = held_out(environments)[0]
    found = job(environments).environments_of(CONFIG.with_options(leave_out=left_out))
    assert left_out not in found.to_leave_out
    assert len(found.held_out) == 3
    assert found.validation == (left_out,)
    epoch, _ = kept(environments, leave_out=left_out)
    assert kept(schools(moved={left_out: 9.0}), leave_out=left_out)[0] == epoch


def test_a_fold_holds_out_environments_as_the_run_on_all_does() -> None:
    ten = schools(NAMES[:10])
    assert job(ten).environments_of(CONFIG.with_options(leave_out=NAMES[0])).held_out
    assert not job(schools(NAMES[:9])).environments_of(CONFIG.with_options(leave_out=NAMES[0])).held_out


def test_every_training_environment_is_left_out_in_turn_also_the_held_out_ones() -> None:
    found = preflight(JobFile.of(job(schools())), CONFIG).environments
    assert set(found.to_leave_out) == set(NAMES)


def test_a_fraction_of_environments_outside_0_to_1_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--held-out-environments 1.0: must be a fraction of the training env"):
        CONFIG.with_options(held_out_environments=1.0).check()


def test_an_epoch_has_at_least_the_steps_asked_for() -> None:
    few, asked = (history(schools(), epoch_steps=steps)[-1] for steps in (0, 7))
    assert (few.step, asked.step, asked.epoch) == (4, 28, 4)
    assert history(schools(), epoch_steps=7, batch_size=2)[-1].step == 4 * 10  # one pass has more
    three = history(schools(), held_out_environments=0.0, environments_per_step=4, epoch_steps=7, epochs=1)[-1]
    assert three.step == 9  # all environments in turn


def test_training_of_the_same_steps_is_the_same_in_epochs_of_any_length() -> None:
    passes, longer = (history(schools(), epochs=epochs, epoch_steps=each)[-1] for epochs, each in ((12, 0), (3, 4)))
    assert passes.step == longer.step == 12
    assert passes.metrics["train_loss"] == longer.metrics["train_loss"]
