"""Agents: reward scale against a slow loop, RLlib's update against a hand-written one, runs, experts."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from recorded import report_of
from safetensors.torch import load_file, save_file
from tracked import points_of, tracked_runs

from concord.errors import CheckpointError, InputError, RunFailedError
from concord.execution.run import run
from concord.record import read_events, require_run
from concord.reinforcement.actor_critic import ActorCritic, Policy
from concord.reinforcement.agent_options import AgentConfig
from concord.reinforcement.agent_training import (
    EXPERT,
    AgentProgress,
    read_training_state,
    train_agent,
    unseen_levels,
    write_training_state,
)
from concord.reinforcement.episodes import play, steps
from concord.reinforcement.expert import load_expert, save_expert, shipped_expert
from concord.reinforcement.procgen_environment import ProcgenVectorEnv
from concord.reinforcement.reward_scale import ScaledRewards
from concord.reinforcement.state_files import read_state, write_state
from concord.tracking import Store, load_program, show
from concord.training import Evaluation, Silent, load_job


@pytest.mark.usefixtures("coinrun")
def test_rewards_are_scaled_by_the_deviation_of_all_running_returns() -> None:
    class Paid(ProcgenVectorEnv):
        """Rewards and ends that are drawn, in place of the game's."""

        def step(self, actions: Any) -> Any:
            frames, _, _, cut, info = super().step(actions)
            return frames, generator.normal(1, 2, 3).astype(np.float32), generator.random(3) < 0.1, cut, info

    generator, again = np.random.default_rng(0), np.random.default_rng(0)
    environment = ScaledRewards(Paid(3, threads=0), 0.9, limit=1.0)
    environment.reset()
    running, seen = np.zeros(3), []
    for _ in range(200):
        _, scaled, ends, *_ = environment.step(np.zeros(3))
        rewards = again.normal(1, 2, 3).astype(np.float32)
        assert np.array_equal(ends, again.random(3) < 0.1)
        running = running * 0.9 + rewards
        seen.append(running.copy())
        np.testing.assert_allclose(scaled, np.clip(rewards / np.std(seen), -1, 1), rtol=2e-2)
        running[ends] = 0
    environment.close()


state = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.text(max_size=3)
    | arrays(np.float32, (2, 3), elements=st.floats(-5, 5, width=32)) | arrays(np.int64, ()),
    lambda below: st.lists(below, max_size=3)
    | st.dictionaries(st.integers(0, 3) | st.text(max_size=3), below, max_size=3),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(state)
def test_a_state_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    folder = tmp_path_factory.mktemp("state")
    write_state(folder, state)
    np.testing.assert_equal(read_state(folder), state)


def build(**changed: Any) -> Any:
    from concord.reinforcement.policy_optimization import build_algorithm

    begins_at = changed.pop("begins_at", 0)
    options: dict[str, Any] = {
        "environments": 8, "rollout": 8, "epochs": 1, "minibatches": 1, "lr": 1e-3, "discount": 0.99, "gae_lambda": 0.9,
        "value": 0.5, "precision": "float32",
    }  # fmt: skip
    return build_algorithm(AgentConfig().with_options(**{**options, **changed}), begins_at)


def by_hand(network: ActorCritic, episodes: list[Any]) -> None:
    """One step of PPO's loss on these episodes, in a few lines, with Â_t = Σ_l (γλ)^l δ_{t+l}."""
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, eps=1e-5)
    frames, actions, before, targets, estimates, bounds = [], [], [], [], [], []
    for episode in episodes:
        seen = torch.from_numpy(np.stack(episode.get_observations(slice(0, len(episode) + 1))))
        with torch.no_grad():
            values = network(seen)[1].numpy()
        values[-1] *= not episode.is_terminated
        rewards = episode.get_rewards(slice(0, len(episode)))
        for t in range(len(episode)):
            errors = [rewards[s] + 0.99 * values[s + 1] - values[s] for s in range(t, len(episode))]
            estimates.append(sum((0.99 * 0.9) ** n * error for n, error in enumerate(errors)))
            targets.append(estimates[-1] + values[t])
        bounds.append((0.99 * values[0] + 0.99 * 0.9 * estimates[-len(episode)], values[-1]))
        frames.append(seen[:-1])
        actions += list(episode.get_actions(slice(0, len(episode))))
        before += list(episode.get_extra_model_outputs("action_logp", slice(0, len(episode))))
    found = torch.tensor(np.array(estimates), dtype=torch.float32)
    # RLlib adds a row to each episode, and counts its estimate (as if the next episode followed) where it normalizes.
    following = [first for first, _ in bounds[1:]] + [0.0]
    added = torch.tensor([after - last for after, (_, last) in zip(following, bounds, strict=True)])
    counted = torch.cat([found, added.float()])
    normal = (found - counted.mean()) / counted.std(unbiased=False).clamp_min(1e-4)
    logits, predicted = network(torch.cat(frames))
    scores = logits.log_softmax(1)
    chosen = scores.gather(1, torch.tensor(np.array(actions))[:, None])[:, 0]
    ratio = (chosen - torch.tensor(np.array(before))).exp()
    gain = torch.min(normal * ratio, normal * ratio.clamp(0.8, 1.2))
    entropy = -(scores.exp() * scores).sum(1)
    errors = (predicted - torch.tensor(np.array(targets), dtype=torch.float32)) ** 2
    (-gain + 0.5 * errors - 0.01 * entropy).mean().backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    optimizer.step()


@pytest.mark.usefixtures("coinrun", "ray_cluster")
def test_rllibs_update_is_the_one_by_hand_and_its_checkpoint_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    algorithm = build()
    runner = algorithm.env_runner_group.local_env_runner
    episodes = runner.sample()
    monkeypatch.setattr(runner, "sample", lambda: copy.deepcopy(episodes))  # RLlib extends them
    network = ActorCritic()
    network.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in algorithm.weights().items()})
    by_hand(network, copy.deepcopy(episodes))
    algorithm.step_batch(0)
    for name, value in algorithm.weights().items():
        torch.testing.assert_close(torch.from_numpy(value.copy()), network.state_dict()[name], rtol=1e-3, atol=2e-5)
    # What runners act by is what was learned.
    held = {name.removeprefix("network."): value for name, value in runner.module.get_state().items()}
    np.testing.assert_array_equal(held["policy.weight"], algorithm.weights()["policy.weight"])

    assert learning_rate(algorithm) == 1e-3
    write_training_state(tmp_path, algorithm, AgentProgress())
    algorithm.step_batch(64)
    expected = copy.deepcopy(algorithm.weights())
    algorithm.set_training_state(read_training_state(tmp_path)[1])
    algorithm.step_batch(64)
    for name, value in algorithm.weights().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6)
    algorithm.stop()


def learning_rate(algorithm: Any) -> float:
    (optimizer,) = algorithm.training_state()["learner"]["optimizer"].values()
    rate: float = optimizer["state"]["param_groups"][0]["lr"]
    return rate


@pytest.mark.slow
@pytest.mark.usefixtures("coinrun", "ray_cluster")
def test_a_schedule_goes_on_where_it_was() -> None:
    options: dict[str, Any] = {"steps": 256, "final_lr": 0.0}
    algorithm = build(**options)
    algorithm.step_batch(0)
    algorithm.step_batch(64)
    assert learning_rate(algorithm) == pytest.approx(0.5e-3)
    state = copy.deepcopy(algorithm.training_state())
    algorithm.stop()
    again = build(**options, begins_at=128)
    again.set_training_state(state)
    assert learning_rate(again) == pytest.approx(0.5e-3)
    first, other = (each.env_runner_group.local_env_runner.sample()[0] for each in (build(**options), again))
    assert not np.array_equal(first.get_observations(0), other.get_observations(0))
    again.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("coinrun", "ray_cluster")
def test_runners_of_their_own_sample_while_the_learner_learns() -> None:
    import ray

    def of_runners() -> list[Any]:
        group = algorithm.env_runner_group
        return group.foreach_env_runner(lambda runner: runner.module.get_state()["network.policy.weight"])

    algorithm = build(runners=2, minibatches=2)
    before = copy.deepcopy(algorithm.weights())
    given = {name: value + 1 for name, value in before.items()}
    algorithm.set_weights_of_network(given)
    for held in of_runners():
        np.testing.assert_array_equal(held, given["policy.weight"])
    algorithm.set_weights_of_network(before)
    algorithm.step_batch(0)
    assert algorithm.batch_steps == 2 * 64
    assert algorithm.env_runner_group.num_in_flight_async_reqs("samples") == 2
    learned = algorithm.step_batch(128)
    # Its minibatches have room for 9 steps of all environments, and begin again with the 8 that there are.
    assert learned["num_module_steps_trained_lifetime"] == 2 * 144
    assert not np.array_equal(before["policy.weight"], algorithm.weights()["policy.weight"])
    for held in of_runners():  # after what they sample meanwhile, they have taken what was learned
        np.testing.assert_array_equal(held, algorithm.weights()["policy.weight"])
    # A checkpoint that is written while a runner is dead is gone on from by both.
    group = algorithm.env_runner_group
    ray.kill(group._worker_manager.actors()[1])
    state = copy.deepcopy(algorithm.training_state())
    algorithm.stop()
    (scale,) = state["reward_scale"].values()
    again = build(runners=2, minibatches=2)
    again.set_training_state(state)
    found = again.env_runner_group.foreach_env_runner(lambda runner: runner.get_state("reward_scale"))
    assert [each["reward_scale"] for each in found] == [scale] * 2
    again.step_batch(256)
    again.stop()


def expert_options(output: Path) -> dict[str, Any]:
    return {
        "output": output, "name": "agent", "environments": 4, "rollout": 16, "epochs": 1, "minibatches": 2,
        "steps": 256, "evaluations": 4, "evaluation_episodes": 1, "final_episodes": 2,
        "checkpoints": 4, "levels": 50, "game": "bigfish",
    }  # fmt: skip


@pytest.mark.usefixtures("coinrun", "ray_cluster")
def test_a_run_is_tracked_drawn_registered_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "postgresql://me:secret@host/db"
    monkeypatch.setattr("sys.argv", ["/bin/concord", "train", "coinrun-expert", "--tracking-uri", uri])
    job = load_job("coinrun-expert")
    lines: list[str] = []
    config = AgentConfig().with_options(**expert_options(tmp_path))
    in_the_way = tmp_path / "artifacts" / "models"
    in_the_way.parent.mkdir()
    in_the_way.write_text("no model can be logged")
    finished = run(job, config, lines.append)
    store = Store.open(tmp_path)
    assert lines[:3] == [
        "run agent: bigfish, easy, 256 steps",
        "data: 50 levels for training, levels from 2,000,000,000 on for evaluation",
        "champion: the version with the largest unseen_return",
    ]
    assert lines[3].startswith("kept in ")
    assert finished.metrics["steps"] == 256
    assert finished.report is None
    assert "the model could not be kept in MLflow: " in lines[-1]
    assert str(in_the_way) in lines[-1]
    assert store.run(str(finished.run_id)).status == "FINISHED"
    assert points_of(store, str(finished.run_id), "unseen_return")[-1] == (256, finished.metrics["unseen_return"])
    in_the_way.unlink()
    for file in ("figures/return.png", "figures/episode.gif", EXPERT):
        assert (finished.folder.path / file).stat().st_size > 1000
    assert {file.name for file in (finished.folder.path / "figures").iterdir()} == {"return.png", "episode.gif"}
    expert = load_expert(finished.folder.path / EXPERT, "bigfish", "easy")
    assert expert.provenance["steps"] == 256
    assert expert.provenance["command"].startswith("concord train coinrun-expert --tracking-uri")
    assert "secret" not in json.dumps(expert.provenance)
    with pytest.raises(InputError, match="add --resume to continue it"):
        run(job, config, lines.append)

    # As if it had been killed while it wrote its last checkpoint.
    before = dict(points_of(store, str(finished.run_id), "policy_loss"))
    checkpoints = sorted(finished.folder.path.glob("checkpoints/*"))
    assert [path.name for path in checkpoints] == [f"checkpoint_{n:012d}" for n in (192, 256)]
    checkpoints[-1].rename(checkpoints[-1].with_suffix(".new"))
    (finished.folder.path / EXPERT).unlink()
    again = run(job, AgentConfig().with_options(**expert_options(tmp_path), resume=True), lines.append)
    assert any(line.startswith("training resumes from epoch 3 with one worker") for line in lines)
    assert [path.name for path in sorted(again.folder.path.glob("checkpoints/*"))] == [
        path.name for path in checkpoints
    ]
    assert again.metrics["steps"] == 256
    assert report_of(again)["model"] == "models:/coinrun-expert-bigfish-easy/1"
    expert = load_expert(again.folder.path / EXPERT)
    assert expert.provenance["unseen_return"] == round(again.metrics["unseen_return"], 3)
    # New episodes after the checkpoint, in the store as in the record; what was before it is there once.
    after = dict(points_of(store, str(again.run_id), "policy_loss"))
    assert [step for step, loss in before.items() if after[step] != loss] == [256]
    events = [each.fields for each in read_events(again.folder.path / "events.jsonl") if each.name == "metrics"]
    losses = [(each["step"], each["metrics"]["policy_loss"]) for each in events if "policy_loss" in each["metrics"]]
    assert [step for step, _ in losses] == [64, 128, 192, 256, 256]
    assert dict(losses) == after
    # What is registered is what was evaluated and kept.
    frames = torch.randint(0, 256, (3, 64, 64, 3), dtype=torch.uint8)
    program = load_program(store, show(store, "coinrun-expert-bigfish-easy", "1"))
    with torch.no_grad():
        torch.testing.assert_close(program(frames), expert.network(frames)[0], rtol=1e-3, atol=1e-5)
    done = run(job, AgentConfig().with_options(**expert_options(tmp_path), resume=True), lines.append)
    assert report_of(done) == report_of(again)


@pytest.mark.slow
@pytest.mark.usefixtures("coinrun", "ray_cluster")
def test_where_nothing_is_kept_an_agent_learns_the_same(tmp_path: Path) -> None:
    job = load_job("coinrun-expert")
    options = expert_options(tmp_path) | {"evaluations": 2, "threads": 1, "register": False}
    config = AgentConfig().with_options(**options)
    assert job.job.loop is not None
    evaluations = list(job.job.loop.run(config, Silent()))
    assert [(each.epoch, each.step) for each in evaluations] == [(1, 128), (2, 256)]
    assert not list(tmp_path.iterdir())
    kept = run(job, config, lambda _: None)
    assert require_run(kept.folder).history == evaluations


@pytest.mark.slow
@pytest.mark.usefixtures("coinrun", "ray_cluster")
def test_an_agent_is_searched_and_its_trials_are_what_its_runs_are(tmp_path: Path) -> None:
    from concord.studies.plan import plan_study
    from concord.studies.study import run_study
    from concord.studies.study_options import options_for

    job = load_job("coinrun-expert")
    given = expert_options(tmp_path) | {"trials": 1, "reruns": 0, "concurrent": 1, "threads": 1}
    given |= {"evaluations": 2, "evaluation_episodes": 2}
    plan = plan_study(job, options_for(job.job.config).with_options(**given), set(given))
    result = run_study(plan, lambda _: None)
    assert not result.failed
    ended = result.best
    assert ended.point == {"lr": 5e-4, "entropy": 0.01}
    assert [(at.epoch, at.step) for at in ended.history] == [(1, 128), (2, 256)]
    assert result.criterion.metric == "unseen_return"
    assert ended.metrics["steps"] == 256
    store = Store.open(tmp_path)
    (winner,) = (each for each in tracked_runs(store, "coinrun-expert-studies") if each.name == "agent-trial-0")
    (version,) = store.client.search_model_versions("name = 'coinrun-expert-bigfish-easy'")
    lineage = {"concord.study": "agent", "concord.trial": "0", "concord.method": "ppo", "concord.seed": "0"}
    assert lineage.items() <= winner.tags.items()
    assert version.tags["concord.study"] == "agent"
    assert "Trial 0 of the study agent" in version.description
    assert winner.metrics["unseen_return"] == ended.metrics["unseen_return"]
    with pytest.raises(InputError, match="--runners 2: a trial samples and learns in its own process, on CPUs; give 0"):
        plan_study(job, options_for(job.job.config).with_options(**given, runners=2), set(given))


@pytest.mark.usefixtures("coinrun", "ray_cluster")
def test_what_a_process_of_its_own_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Failing:
        def step_batch(self, steps: int) -> Any:
            task: Any = ray.remote(lambda: steps / 0)
            return ray.get(task.remote())

        def stop(self) -> None:
            pass

    monkeypatch.setattr("concord.reinforcement.policy_optimization.build_algorithm", lambda *_: Failing())
    with pytest.raises(RunFailedError, match=r"^training failed: ZeroDivisionError: division by zero$"):
        next(train_agent(AgentConfig(), Silent()))


@pytest.mark.parametrize("file", ["training.safetensors", "training.json", "progress.json"])
def test_a_torn_checkpoint_is_refused_by_name(file: str, tmp_path: Path) -> None:
    write_state(tmp_path, {"weight": np.ones(2)})
    history = [Evaluation(1, 64, {"unseen_return": 2.0})]
    (tmp_path / "progress.json").write_text(json.dumps(dataclasses.asdict(AgentProgress(64, history=history))))
    progress, state = read_training_state(tmp_path)
    assert (progress.history, list(state)) == (history, ["weight"])
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=f"checkpoint {tmp_path}: cannot be read"):
        read_training_state(tmp_path)


@pytest.mark.usefixtures("coinrun", "ray_cluster")
def test_more_processes_than_cpus_are_refused(tmp_path: Path) -> None:
    job = load_job("coinrun-expert")
    with pytest.raises(InputError, match=r"--runners 500 --learners 0: they need a CPU each, 500 in all"):
        run(job, AgentConfig().with_options(output=tmp_path, runners=500, name="many"), print)
    assert not (tmp_path / "runs" / "many").exists()


@pytest.mark.usefixtures("coinrun")
def test_the_first_episodes_to_begin_are_counted_not_the_first_to_end() -> None:
    policy = ActorCritic()

    def environment() -> ProcgenVectorEnv:
        return ProcgenVectorEnv(3, "leaper", seed=0, threads=0)  # its episodes end within 500 steps

    seen = list(steps(lambda frames: policy(frames)[0], environment(), 5, torch.Generator().manual_seed(0)))
    numbers = np.concatenate([step.episodes for step in seen])
    assert set(numbers.tolist()) == set(range(5))
    ended = np.concatenate([step.episodes[step.ended] for step in seen])
    assert sorted(ended.tolist()) == list(range(5))
    result = play(lambda frames: policy(frames)[0], environment(), 5)
    assert result.returns[ended].tolist() == np.concatenate([step.returns[step.ended] for step in seen]).tolist()
    assert result.mean == pytest.approx(result.returns.mean())


def test_an_expert_survives_its_file(tmp_path: Path) -> None:
    network = ActorCritic()
    path = tmp_path / "expert.safetensors"
    save_expert(path, network, {"game": "maze", "difficulty": "hard", "steps": 5})
    expert = load_expert(path, "maze", "hard")
    for name, value in expert.network.state_dict().items():
        torch.testing.assert_close(value, network.state_dict()[name], rtol=1e-3, atol=1e-6)
    assert expert.provenance["steps"] == 5
    assert load_expert(path).version == expert.version
    assert not list(tmp_path.glob("*.new"))


def test_experts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "expert.safetensors"

    def refused(**wanted: Any) -> str:
        with pytest.raises(InputError) as error:
            load_expert(path, **wanted)
        assert str(error.value).startswith(f"--expert {path}: ")
        return str(error.value).removeprefix(f"--expert {path}: ")

    assert refused() == "there is no such file; concord train coinrun-expert trains an expert"
    path.write_bytes(b"not safetensors")
    assert "cannot be read as safetensors" in refused()
    save_file({"weight": torch.ones(2)}, path)
    assert "does not say what it was trained on" in refused()
    save_expert(path, torch.nn.Linear(2, 2), {"game": "maze", "difficulty": "hard"})
    assert "its weights are not those of Concord's network for maze" in refused()
    assert refused(game="coinrun") == "was trained on game maze, not on coinrun"
    assert refused(game="maze", difficulty="easy") == "was trained on difficulty hard, not on easy"


def test_the_packaged_expert_is_small_and_names_its_origin() -> None:
    path = shipped_expert("coinrun", "easy")
    expert = load_expert(path, "coinrun", "easy")
    assert path.stat().st_size < 2 << 20
    assert {"steps", "command", "hardware", "unseen_return", "episodes"} <= expert.provenance.keys()
    assert all(bool(torch.isfinite(value).all()) for value in load_file(path).values())


@pytest.mark.slow
@pytest.mark.usefixtures("coinrun")
def test_the_expert_that_comes_with_concord_plays_as_well_as_it_says() -> None:
    """500 episodes on levels that it was not trained on, other ones than those of its own evaluation."""
    expert = load_expert(shipped_expert("coinrun", "easy"))
    environment = unseen_levels(AgentConfig(), 64, seed=99)
    played = play(Policy(expert.network), environment, 500)
    print(f"mean return {played.mean:.2f}, standard error {played.standard_error:.2f}")
    assert played.mean >= 7.5
    said = expert.provenance["unseen_return"]
    assert abs(played.mean - said) < 4 * np.hypot(played.standard_error, expert.provenance["standard_error"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"game": "pacman"}, "--game pacman: must be one of"),
        ({"levels": 0}, "--levels 0: must lie in"),
        ({"steps": 10}, "--steps 10: less than one batch, 16384 steps"),
        ({"environments": 1, "rollout": 4}, "--minibatches 8: more than the 4 steps of a batch"),
        ({"lr": 0.0}, "--lr 0.0: must be a finite number above 0"),
        ({"discount": 1.5}, "--discount 1.5: must lie in"),
        ({"runners": -1}, "--runners -1: must be a finite number, not negative"),
        ({"entropy": float("inf")}, "--entropy inf: must be a finite number, not negative"),
        ({"gpus_per_runner": 1.0}, "--gpus-per-runner 1.0: needs --runners; without, sampling is where the learner is"),
        ({"gpus_per_learner": 1.0}, "--gpus-per-learner 1: there is no GPU here"),
        ({"initial": Path("nowhere")}, "/nowhere: there is no such file"),
    ],
)
def test_wrong_options_are_refused_and_leave_nothing(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    if "gpus_per_learner" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    job = load_job("coinrun-expert")
    with pytest.raises(InputError) as error:
        run(job, AgentConfig().with_options(output=tmp_path / "out", **options), print)
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()
