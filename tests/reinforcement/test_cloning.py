"""Cloning: the kept states of the expert, levels in turn, and the job with its studies, on real CoinRun."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matplotlib.collections import PathCollection

from concord.analysis.comparison_figures import bootstrapped_interval
from concord.cli import main
from concord.environments import BatchStream, Environment
from concord.environments.sharded import SPLITS
from concord.errors import InputError
from concord.models import ChannelsFirst, ResNet18
from concord.options import option_values
from concord.reinforcement.actor_critic import ActorCritic, Policy
from concord.reinforcement.cloning_data import CloningData, CloningOptions, make_cloning_data, one_a_level
from concord.reinforcement.episodes import Step
from concord.reinforcement.expert import load_expert, save_expert, shipped_expert
from concord.reinforcement.games import FIRST_UNSEEN_LEVEL
from concord.studies.job_tables import comparisons_of
from concord.studies.plan import plan_study
from concord.studies.study import run_study
from concord.studies.study_options import options_for
from concord.training import Evaluation, ProcessContext, Run, TrainConfig, load_job, train
from concord.training.context import Silent
from concord.training.worker_data import check_environments
from concord_jobs.coinrun_clone.tables import OPTIONS

# Levels of which the expert soon reaches the end.
SMALL: dict[str, Any] = {"levels": 3, "states": 12, "first_level": 19, "test_states": 2, "validation_states": 2}


def quiet(_: str) -> None: ...


@pytest.fixture(scope="module")
def data(coinrun: None, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cloning") / "data"
    said = make_cloning_data(CloningOptions(data=folder, **SMALL), quiet)
    assert said["files_made"] == 5
    return folder


# --- the data


def test_states_come_with_what_the_expert_would_do(data: Path) -> None:
    expert = load_expert(shipped_expert("coinrun", "easy"))
    there = CloningData(data)
    assert there.levels == (19, 20, 21)
    parts = [there.level(level) for level in there.levels] + [there.split("test"), there.split("validation")]
    assert [len(frames) for frames, _ in parts] == [12, 12, 12, 2, 2]
    policy = Policy(expert.network)
    for frames, distribution in parts:
        assert frames.dtype == torch.uint8
        assert frames.shape[1:] == (64, 64, 3)
        torch.testing.assert_close(distribution.sum(1), torch.ones(len(frames)), rtol=0, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(distribution, policy(frames).softmax(1), rtol=1e-4, atol=1e-5)
        assert len({bytes(frame.numpy()) for frame in frames}) > len(frames) / 2


def test_no_level_serves_two_purposes(data: Path) -> None:
    there = CloningData(data)
    of_split = {split: [level for group in there.groups(split) for level in group.facts["levels"]] for split in SPLITS}
    levels = [level for levels in of_split.values() for level in levels]
    assert len(levels) == len(set(levels)) == 3 + 2 + 2
    assert all(level >= FIRST_UNSEEN_LEVEL for level in of_split["validation"] + of_split["test"])
    assert there.options["expert"] == load_expert(shipped_expert("coinrun", "easy")).version


@pytest.mark.slow
def test_another_seed_makes_other_states(data: Path, tmp_path: Path) -> None:
    few = {**SMALL, "levels": 1, "test_states": 1, "validation_states": 0}
    make_cloning_data(CloningOptions(data=tmp_path / "other", seed=1, **few), quiet)
    other = CloningData(tmp_path / "other")
    assert not other.groups("validation")
    assert other.level(19)[0].shape == (12, 64, 64, 3)
    assert not torch.equal(other.level(19)[0], CloningData(data).level(19)[0])
    assert other.version != CloningData(data).version


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"levels": 0}, "--levels 0: must be at least 1"),
        ({"states": 0}, "--states 0: must be at least 1"),
        ({"game": "pacman"}, "--game pacman: must be one of"),
        ({"game": "maze"}, "maze-easy.safetensors: there is no such file"),
        ({"expert": Path("nowhere")}, "--expert nowhere: there is no such file"),
        ({"first_test_level": 5, "first_level": 0, "levels": 8}, "the training levels 0 to 7 would be among the test"),
        ({"first_test_level": 5, "first_level": 500}, "the training levels 500 to 502 would be among the test levels"),
        ({"first_test_level": 2**31 - 5}, "--first-test-level 2147483643: too few levels"),
        ({"tasks": 0}, "--tasks 0: must be at least 1"),
    ],
)
def test_wrong_options_are_refused_and_leave_nothing(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        make_cloning_data(CloningOptions(**{**SMALL, "data": tmp_path / "data", **options}), quiet)
    assert said in str(error.value)
    assert not (tmp_path / "data").exists()


def test_data_of_another_expert_are_left_alone(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_expert(other, ActorCritic(), {"game": "coinrun", "difficulty": "easy"})
    with pytest.raises(InputError, match=r"--expert .*: the data in .* are made with .*; give another"):
        make_cloning_data(CloningOptions(data=data, expert=other, **SMALL), quiet)


# --- levels in turn


def levels(count: int, examples: int = 10) -> list[Environment]:
    inputs = torch.arange(count * examples).view(count, examples, 1).float()
    return [Environment.of(f"level-{i}", inputs[i], inputs[i] * 2) for i in range(count)]


def test_every_round_visits_all_environments_once_in_its_own_order() -> None:
    stream = BatchStream(levels(6), 4, seed=0, together=2)
    assert stream.steps_per_epoch == 3 * 3
    orders = []
    for rounds in range(5):
        order = [name for step in range(3) for name in stream.names(3 * rounds + step)]
        assert sorted(order) == [f"level-{i}" for i in range(6)]
        orders.append(tuple(order))
    assert len(set(orders)) > 1
    for step in (7, 2, 14):  # any step can be asked for: a resumed run begins in the middle
        inputs, targets = stream.batch(step)
        assert inputs.shape == (2, 4, 1)
        assert [f"level-{int(first) // 10}" for first in inputs[:, 0, 0]] == stream.names(step)
        torch.testing.assert_close(targets, inputs * 2)


def test_in_turn_environments_give_the_batches_they_give_together() -> None:
    everything, in_turn = BatchStream(levels(4), 4, seed=3), BatchStream(levels(4), 4, seed=3, together=1)
    for step in range(20):
        (name,) = in_turn.names(step)
        expected = everything.batch(step // 4)[0][int(name.removeprefix("level-"))]
        torch.testing.assert_close(in_turn.batch(step)[0][0], expected)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(0, 60), st.integers(0, 9))
def test_any_number_of_environments_a_step_takes_each_once_a_round(
    count: int, together: int, batches_each: int, resumed: int, seed: int
) -> None:
    assume(together <= count)
    arguments: dict[str, Any] = {"seed": seed, "together": together, "batches_each": batches_each}
    stream, everything = BatchStream(levels(count), 4, **arguments), BatchStream(levels(count), 4, seed)
    taken = []
    for step in range(61):
        names = stream.names(step)
        assert len(set(names)) == len(names) == together * batches_each  # none twice
        taken += names
    for rounds in range(len(taken) // (count * batches_each)):
        part = taken[rounds * count * batches_each : (rounds + 1) * count * batches_each]
        assert len(set(part)) == count * batches_each
    again = BatchStream(levels(count), 4, **arguments)  # a resumed run begins in the middle
    assert again.names(resumed) == stream.names(resumed)
    inputs, _ = again.batch(resumed)
    for place in range(together):
        at = resumed * together + place
        index = int(inputs[place * batches_each, 0, 0]) // 10
        assert stream.names(resumed)[place * batches_each].split(",")[0] == f"level-{index}"
        for k in range(batches_each):
            expected = everything.batch(at // count * batches_each + k)[0][index]
            torch.testing.assert_close(inputs[place * batches_each + k], expected)
    rounds = -(-3 // batches_each)  # of ten examples each, four a batch
    assert stream.steps_per_epoch == -(-rounds * count // together)


def test_numbers_of_environments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"together=7: must lie in \[1, 6\], up to all environments"):
        BatchStream(levels(6), 4, seed=0, together=7)
    data = CloneData(6)
    check_environments(TrainConfig().with_options(environments_per_step=4).resolve(), data.environments)
    with pytest.raises(InputError, match="--environments-per-step 7: there are 6 training environments; give fewer"):
        check_environments(TrainConfig().with_options(environments_per_step=7).resolve(), data.environments)
    with pytest.raises(InputError, match="--workers 3: must divide the 2 environments of a step, and all 6"):
        check_environments(TrainConfig().with_options(environments_per_step=2, workers=3).resolve(), data.environments)
    with pytest.raises(InputError, match="--environments-per-step 1: with --per-example"):
        TrainConfig().with_options(environments_per_step=1, per_example=True).check()


class CloneData:
    """The environments of a made-up job."""

    def __init__(self, count: int) -> None:
        from concord.environments import Environments

        self.environments = Environments.from_arrays({e.name: (e.inputs, e.targets) for e in levels(count)})


# --- the job


def config(folder: Path, **options: Any) -> Any:
    job = load_job("coinrun-clone").job
    small = {"data": folder, "epochs": 2, "batch_size": 12, "play_episodes": 0, "evaluations": 2, "output": folder}
    return job.config.with_options(**{**small, **options})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"optimizer": "adam", "beta1": 0.9, "lr": 1e-3}, marks=pytest.mark.slow),
        pytest.param({"temporal_threshold": 0.1, "lr": 1e-3}, marks=pytest.mark.slow),
        {"environments_per_step": 3, "aggregator": "and-mask", "optimizer": "adam", "lr": 1e-3},
    ],
    ids=["adam", "temporal", "spatial"],
)
def test_clones_learn_from_the_expert(data: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    few = config(data, states=6, batch_size=6, **options)  # a step takes seconds in the job's own precision
    outcome = train(load_job("coinrun-clone").job, few, ProcessContext(), Silent())
    first, last = outcome.history[0].metrics, outcome.history[-1].metrics
    assert last["train_loss"] < first["train_loss"]
    assert {"validation_loss", "ood_loss", "ood_agreement", "worst_train_loss"} <= last.keys()
    per_round = 1 if options.get("environments_per_step") == 3 else 3
    assert outcome.steps == 2 * per_round


def test_fewer_states_of_a_level_are_drawn_from_its_whole_play(data: Path) -> None:
    job, there = load_job("coinrun-clone").job, CloningData(data)
    drawn = {}
    for count in (3, 6):
        environments = job.environments(config(data, states=count))
        for level in there.levels:
            frames, policy = environments[f"level-{level}"].data
            whole, its_policy = there.level(level)
            at = [next(n for n, each in enumerate(its_policy) if torch.equal(each, row)) for row in policy]
            assert torch.equal(whole[at], frames)
            drawn[level, count] = at
    assert all(drawn[level, 6][:3] == drawn[level, 3] for level in there.levels)
    assert any(max(drawn[level, 3]) >= 6 for level in there.levels)  # not the first, which are the earliest
    assert job.environments(config(data, states=3)).version != job.environments(config(data)).version


def test_the_figure_of_the_levels_shows_a_state_of_each(data: Path) -> None:
    """Fig. 17: the figure of every run, here of three levels."""
    job, options = load_job("coinrun-clone").job, config(data)
    levels = job.environments(options)
    (figure,) = job.figures(job, options, None, None).values()
    shown = {axes.get_title(): axes.images[0].get_array() for axes in figure.axes if axes.images}
    assert tuple(shown) == levels.train[:6]
    for name, image in shown.items():
        assert any((image == state.numpy()).all() for state in levels[name].inputs)


def test_divergence_is_kullback_and_leiblers() -> None:
    job = load_job("coinrun-clone").job
    logits, expert = torch.randn(7, 15), torch.randn(7, 15).softmax(1)
    expert[0] = torch.nn.functional.one_hot(torch.tensor(3), 15)
    q = logits.softmax(1)
    expected = sum(float(p * (p / r).log()) for p, r in zip(expert.flatten(), q.flatten(), strict=True) if p > 0) / 7
    assert float(job.loss(logits, expert)) == pytest.approx(expected, rel=1e-5)
    assert float(job.loss(expert.clamp_min(1e-30).log(), expert)) == pytest.approx(0, abs=1e-6)


def test_the_network_is_resnet_18() -> None:
    network = ResNet18()
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_184_207
    assert sum(isinstance(module, torch.nn.Conv2d) for module in network.modules()) == 17 + 3
    frames = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    images = frames.permute(0, 3, 1, 2).float() / 255
    network.eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.nn.Sequential(ChannelsFirst(), network)(frames), network(images))


def test_a_trained_clone_plays_levels_that_it_never_saw(data: Path) -> None:
    from concord.reinforcement.procgen_environment import ProcgenVectorEnv

    job = load_job("coinrun-clone").job
    clone = torch.nn.Sequential(ChannelsFirst(), ResNet18())
    # Pressing right and up all the time earns something in some levels, and ends soon.
    torch.nn.init.zeros_(clone[1].classifier.weight)
    with torch.no_grad():
        clone[1].classifier.bias.copy_(torch.nn.functional.one_hot(torch.tensor(8), 15) * 5.0)
    seen: list[torch.Tensor] = []
    clone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    played = job.final_measures(config(data, play_episodes=2), clone.eval())
    assert 0 <= played["ood_return"] <= 10
    found = CloningData(data)
    first, levels = found.manifest["unseen_levels"]
    assert not {*range(first, first + levels)} & {*found.levels}
    game = ProcgenVectorEnv(
        2, levels=levels, first_level=first, difficulty=option_values(config(data))["difficulty"], seed=1
    )
    with contextlib.closing(game):
        assert torch.equal(seen[0], torch.as_tensor(game.reset()[0]))
    assert job.final_measures(config(data), clone) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"levels": 4}, "--levels 4: the data have 3 training levels"),
        ({"states": 13}, "--states 13: the data have 12 states of each level"),
        ({"difficulty": "hard"}, "--difficulty hard: the data in"),
        ({"data": Path("nowhere")}, "--data nowhere: no data of coinrun-clone; concord data"),
    ],
)
def test_options_that_do_not_fit_the_data_are_refused(data: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        load_job("coinrun-clone").job.environments(config(data, **options))
    assert said in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_studies_of_both_methods_and_their_report(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job("coinrun-clone")
    for method in ("adam", "temporal-and-mask"):
        options = {
            "method": method, "trials": 2, "shortlist": 0, "reruns": 0, "register": False,
            "data": data, "output": tmp_path, "epochs": 2, "batch_size": 12, "states": 12, "evaluations": 2,
            "name": method, "search": "random",
        }  # fmt: skip
        plan = plan_study(job, options_for(job.job.config).with_options(**options), given=set(options))
        result = run_study(plan, quiet)
        assert len(result.finished) == 2
        points = [each.point for each in result.finished]
        assert all(("temporal_threshold" in point) == (method == "temporal-and-mask") for point in points)
    where = ["--data", str(data), "--output", str(tmp_path)]
    assert main(["compare", "coinrun-clone", "clones", *FEW, *where]) == 0
    assert main(["report", "coinrun-clone", "--output", str(tmp_path), "--best", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = said["tables"]["clones"]["rows"]
    assert [row["name"] for row in rows] == ["adam", "temporal-and-mask", "adam, levels together", "spatial-and-mask"]
    assert {method: each["test loss"]["trials"] for method, each in said["best trials (oracle)"].items()} == {
        "adam": 2, "temporal-and-mask": 2
    }  # fmt: skip
    for name in ("clones", "best-runs", "curves"):
        assert Path(said["figures"][name]).stat().st_size > 5000


# As many levels as there are.
FEW = ["--seeds", "1", "--epochs", "1", "--states", "12", "--play-episodes", "0", "--environments-per-step", "3"]


def test_the_interval_of_a_mean_is_the_one_of_resampling_by_hand() -> None:
    values = np.random.default_rng(1).normal(0, 1, (12, 3))
    generator = np.random.default_rng(5)
    means = np.stack([values[generator.integers(0, 12, 12)].mean(0) for _ in range(4000)])
    low, high = bootstrapped_interval(values)
    np.testing.assert_allclose(low, np.quantile(means, 0.025, axis=0), atol=0.05)
    np.testing.assert_allclose(high, np.quantile(means, 0.975, axis=0), atol=0.05)


def test_configurations_of_both_methods_differ_in_the_optimizer_alone() -> None:
    job = load_job("coinrun-clone").job
    temporal, adam = (job.studies[name].space.entries for name in ("temporal-and-mask", "adam"))
    assert set(temporal) - set(adam) == {"beta3", "temporal_threshold"}
    assert {name for name in adam if adam[name] != temporal[name]} == {"optimizer"}
    assert {study.selection for study in job.studies.values()} == {None}  # so that validation environments judge


def test_the_papers_settings_and_those_of_adam_are_drawn_side_by_side() -> None:
    job = load_job("coinrun-clone")
    table = comparisons_of(job)["table-3"]
    options = {name: option_values(job.job.config.with_options(**row)) for name, row in table.configurations.items()}
    assert Counter(each["optimizer"] for each in options.values()) == {"temporal-and-mask": 5, "adam": 5}
    assert {each["regularization"] for each in options.values()} == {"decoupled"}  # as in the paper's best
    defaults = option_values(job.job.config)
    assert [options["row 1"][name] for name in OPTIONS] == [defaults[name] for name in OPTIONS]

    def run(row: str, lowest: float) -> Run:
        losses = ({"train_loss": lowest / 2, "ood_loss": value} for value in (lowest + 0.1, lowest, lowest + 0.2))
        return Run.of([Evaluation(epoch, epoch, each) for epoch, each in enumerate(losses, 1)], 0, options[row])

    runs = {row: [run(row, 0.1 + 0.01 * place)] for place, row in enumerate(options)}
    best, curves = (draw(runs).axes for draw in table.figures.values())
    drawn = [
        points.get_offsets()[:, 1].tolist() for points in best[0].collections if isinstance(points, PathCollection)
    ]
    assert drawn == [pytest.approx([0.1 + 0.01 * (place + start) for place in range(5)]) for start in (0, 5)]
    assert [axes.get_title() for axes in curves] == ["training levels", "unseen levels"]
    means = [line.get_ydata()[-1] for line in curves[1].lines]
    assert means == pytest.approx([0.1 + 0.01 * 2 + 0.2, 0.1 + 0.01 * 7 + 0.2])


def test_the_studies_are_judged_by_validation_levels_unless_told_otherwise(data: Path, tmp_path: Path) -> None:
    job = load_job("coinrun-clone")
    options = {"method": "adam", "data": data, "output": tmp_path}
    plan = plan_study(job, options_for(job.job.config).with_options(**options), given=set(options))
    assert plan.criterion.metric == "validation_loss"
    assert plan.test_usage is None
    assert plan.spec().key.data == CloningData(data).version
    options["selection"] = "oracle"
    oracle = plan_study(job, options_for(job.job.config).with_options(**options), given=set(options))
    assert oracle.test_usage == "selection"


def test_a_state_of_an_episode_is_as_likely_as_any_other() -> None:
    def episode() -> list[Step]:
        nothing = np.zeros(1)
        frames, logits = np.zeros((1, 64, 64, 3), np.uint8), np.zeros((1, 15), np.float32)
        level, number = np.array([7], np.int32), np.array([0])
        return [
            Step(frames, logits, number, level, np.array([at == 9]), nothing.astype(np.float32)) for at in range(10)
        ]

    counts = np.zeros(10)
    drawn = np.random.default_rng(0)
    for _ in range(2000):
        states = one_a_level(episode(), 1, drawn)
        assert states is not None
        counts[states.step[0]] += 1
    assert abs(counts - 200).max() < 70  # five standard deviations
    assert one_a_level(episode(), 2, drawn) is None
