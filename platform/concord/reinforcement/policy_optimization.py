"""Proximal policy optimization by RLlib: its runner, advantages, learner and loss, on a native vector environment.

Added to RLlib: the agent's network, the reward scale of Procgen's authors, sampling of the next batch while the learner
learns, and weights, optimizer and scale as arrays, which a checkpoint stores without pickle.
"""

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import VectorizeMode, spaces
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune import register_env
from torch import Tensor

from concord.errors import RunFailedError
from concord.reinforcement.actor_critic import ActorCritic
from concord.reinforcement.agent_options import AgentConfig
from concord.reinforcement.games import ACTIONS, FRAME
from concord.reinforcement.procgen_environment import ProcgenVectorEnv
from concord.reinforcement.reward_scale import ScaledRewards
from concord.training.process import own_cores, tune_process

_SCALE = "reward_scale"
_SAMPLES = "samples"
_WEIGHTS = "weights"
_MOST_EMPTY_ROUNDS = 5  # rounds without an answer of any runner
_NETWORK = "network."  # prefix of the network's parameters in the module


def _quiet() -> None:
    """Silence RLlib's warnings about its own code, in every process."""
    for name in ("ray.rllib", "ray._common.deprecation"):
        logging.getLogger(name).setLevel(logging.ERROR)


class PolicyModule(TorchRLModule, ValueFunctionAPI):
    """The agent's network as a module of RLlib; one pass returns logits and values.

    ``model_config``: ``precision`` of the network's computation (``bfloat16`` or ``float32``), and ``compile``.
    """

    def setup(self) -> None:
        """Make the network."""
        self.network = ActorCritic(ACTIONS)
        self.autocast = getattr(torch, self.model_config["precision"])
        if self.model_config["compile"]:
            self.network.compile(dynamic=False)

    def _forward(self, batch: Mapping[str, Tensor], **_: Any) -> dict[str, Tensor]:
        frames = batch[Columns.OBS]
        with torch.autocast(frames.device.type, self.autocast, enabled=self.autocast != torch.float32):
            logits, values = self.network(frames)
        return {Columns.ACTION_DIST_INPUTS: logits, Columns.EMBEDDINGS: values}

    def compute_values(self, batch: Mapping[str, Tensor], embeddings: Tensor | None = None) -> Tensor:
        """The values, computed with the logits by the learner (``embeddings``) or by the runner (``batch``)."""
        if embeddings is not None:
            return embeddings
        values, last = batch[Columns.EMBEDDINGS].clone(), ~batch[Columns.LOSS_MASK]
        with torch.no_grad():  # the last states, without an action, one for each part of an episode
            values[last] = self._forward({Columns.OBS: batch[Columns.OBS][last]})[Columns.EMBEDDINGS]
        return values


class WithoutLastStates(ConnectorV2):
    """Drops the row that RLlib adds to each part of an episode: the loss ignores it, but the network computes it."""

    def __call__(self, *, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        """The batch without these rows; runs after the advantages are computed."""
        for module, columns in batch.items():
            kept = columns.pop(Columns.LOSS_MASK)
            batch[module] = {name: column[kept] for name, column in columns.items()}
        return batch


class PolicyLearner(PPOTorchLearner):
    """RLlib's learner, with the published ε of Adam."""

    def build(self) -> None:
        """Make module and optimizer; set threads and denormal numbers of this process."""
        _quiet()
        tune_process(self.config.learner_config_dict["threads"])
        super().build()
        self._learner_connector.append(WithoutLastStates())

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Adam with ε = 1e-5."""
        parameters = self.get_parameters(self._module[module_id])
        optimizer = torch.optim.Adam(parameters, eps=1e-5)
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=parameters, lr_or_lr_schedule=config.lr
        )


class ProcgenRunner(SingleAgentEnvRunner):
    """RLlib's runner on one native vector environment; the scale of its rewards is part of its state."""

    def make_env(self) -> None:
        """Set up this process, and make the environment."""
        _quiet()
        remote = self.config.num_env_runners > 0
        tune_process(1 if remote else None)
        if not remote and self.config.num_learners == 0 and self.config.num_gpus_per_learner > 0:
            self._device = torch.device("cuda")  # the learner's; RLlib would sample on the CPU
        super().make_env()

    def sample(self, **options: Any) -> list[SingleAgentEpisode]:
        """The next steps of all environments."""
        episodes: list[SingleAgentEpisode] = super().sample(**options)
        self.get_metrics()  # otherwise the runner keeps the episodes
        return episodes

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """RLlib's state, and the scale of rewards."""
        state: dict[str, Any] = super().get_state(components, not_components=not_components, **options)
        if self._check_component(_SCALE, components, not_components):
            state[_SCALE] = [float(each) for each in vars(self._returns).values()]
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Set RLlib's state and the scale of rewards, if they are given."""
        super().set_state(state)
        if _SCALE in state:
            vars(self._returns).update(zip(vars(self._returns), state[_SCALE], strict=True))

    @property
    def _returns(self) -> Any:
        return self.env.env.returns  # RLlib wraps the environment once


def _scale(runner: ProcgenRunner) -> tuple[int, list[float]]:
    """The runner's number (0: in the learner's process), and its scale of rewards."""
    return runner.worker_index or 0, runner.get_state(_SCALE)[_SCALE]


def _environment(context: Mapping[str, Any]) -> ScaledRewards:
    """Make an environment; RLlib resets it with the runner's own seed, so that each runner plays other levels."""
    settings = dict(context)
    return ScaledRewards(ProcgenVectorEnv(settings.pop("num_envs"), **settings))


class PolicyOptimization(PPO):
    """PPO. ``learner_config_dict``: ``overlap``, whether the next batch is sampled while the present one is learned.

    With ``overlap`` the weights before the last update sample the batch. This is correct, since the ratio in PPO's loss
    refers to the sampling policy.

    Attributes:
        returns: unscaled returns of the episodes that ended in the last batch.
        batch_steps: number of environment steps of the last batch.
    """

    def step_batch(self, steps: int) -> dict[str, float]:
        """Sample and learn from one batch, after ``steps`` environment steps; return the learner's metrics."""
        self._steps = steps
        results = self.train()[LEARNER_RESULTS][DEFAULT_MODULE_ID]
        return {name: float(value) for name, value in results.items() if isinstance(value, int | float)}

    def training_step(self) -> None:
        """Sample, learn, and send the new weights to the runners."""
        overlap = self.config.learner_config_dict["overlap"]
        if self.config.num_env_runners == 0:
            sampled = [self.env_runner_group.local_env_runner.sample()]
        else:
            sampled = self._next_episodes()
            if overlap:
                self._begin_sampling()
        episodes = [episode for each in sampled for episode in each]
        self.returns = [float(each.get_infos(-1)["episode"]["r"]) for each in episodes if each.is_done]
        # The requested number, so that a resumed run counts equally; RLlib samples more steps at episodes' ends.
        self.batch_steps = len(sampled) * self.config.num_envs_per_env_runner * self.config.rollout_fragment_length
        results = self.learner_group.update(
            episodes=episodes,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._steps + self.batch_steps},
            num_epochs=self.config.num_epochs,
            minibatch_size=self.config.minibatch_size,
            shuffle_batch_per_epoch=True,
        )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        # Runners take the weights after their present batch; RLlib's own method drops weights that arrive earlier.
        self._tell_runners(wait=not overlap)

    def _tell_runners(self, wait: bool = True) -> None:
        """Send the learner's weights to all runners; with ``wait``, return after they have taken them."""
        state = {COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: {_NETWORK + k: v for k, v in self.weights().items()}}}
        group = self.env_runner_group
        if group.local_env_runner is not None:
            group.local_env_runner.set_state(state)
            return
        if wait:
            group.foreach_env_runner("set_state", kwargs={"state": state})
            return
        group.fetch_ready_async_reqs(tags=_WEIGHTS)
        group.foreach_env_runner_async("set_state", tag=_WEIGHTS, kwargs={"state": state})

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        """The network's weights by parameter name."""
        state = self.learner_group.get_state(components=f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}")
        module = state[COMPONENT_LEARNER][COMPONENT_RL_MODULE][DEFAULT_MODULE_ID]
        return {name.removeprefix(_NETWORK): value for name, value in module.items()}

    def set_weights_of_network(self, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace the network's weights, in learners and runners."""
        module = {_NETWORK + name: value for name, value in weights.items()}
        self.learner_group.set_state({COMPONENT_LEARNER: {COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: module}}})
        self._tell_runners()

    def training_state(self) -> dict[str, Any]:
        """The state of the training: weights and optimizer in RLlib's form, and scales of rewards."""
        parts = [f"{COMPONENT_LEARNER}/{each}" for each in (COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER)]
        learner = self.learner_group.get_state(components=parts)[COMPONENT_LEARNER]
        # Scales of the living runners, by number: a dead runner does not answer, and is restarted.
        return {
            COMPONENT_LEARNER: {part: learner[part] for part in (COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER)},
            _SCALE: dict(self.env_runner_group.foreach_env_runner(_scale)),
        }

    def set_training_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`training_state`."""
        self.learner_group.set_state({COMPONENT_LEARNER: state[COMPONENT_LEARNER]})
        self._tell_runners()
        if scales := dict(state[_SCALE]):  # empty if no runner lived
            others = next(iter(scales.values()))
            self.env_runner_group.foreach_env_runner(
                lambda runner: runner.set_state({_SCALE: scales.get(runner.worker_index or 0, others)})
            )

    def _begin_sampling(self) -> None:
        self.env_runner_group.foreach_env_runner_async("sample", tag=_SAMPLES)

    def _next_episodes(self) -> list[list[SingleAgentEpisode]]:
        """The sampled episodes of each runner."""
        group = self.env_runner_group
        if group.num_in_flight_async_reqs(_SAMPLES) == 0:
            self._begin_sampling()
        found: list[list[SingleAgentEpisode]] = []
        empty = 0
        while not found or group.num_in_flight_async_reqs(_SAMPLES) > 0:
            found += [episodes for _, episodes in group.fetch_ready_async_reqs(tags=_SAMPLES, timeout_seconds=1.0)]
            if not found and group.num_in_flight_async_reqs(_SAMPLES) == 0:  # all runners died and restart
                empty += 1
                if empty > _MOST_EMPTY_ROUNDS:
                    raise RunFailedError(f"sampling failed {empty} times in all runners; their logs say why")
                if group.probe_unhealthy_env_runners():
                    self._tell_runners()
                self._begin_sampling()
        return found


def build_algorithm(agent: AgentConfig, begins_at: int = 0) -> Any:
    """The :class:`PolicyOptimization` of these options; a resumed run plays other levels than its beginning."""
    rows = agent.batch // max(1, agent.learners)
    # RLlib samples up to one step more; with a smaller limit the learner would take one more step in each pass.
    most = rows + math.ceil(rows / agent.rollout)
    threads = agent.threads
    if threads is None and agent.runners + agent.learners > 0:
        threads = max(1, own_cores() - agent.runners)
    _quiet()
    config = PPOConfig(algo_class=PolicyOptimization)
    config.api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
    register_env("procgen", _environment)
    config.environment(
        "procgen",
        env_config={"game": agent.game, "difficulty": agent.difficulty, "levels": agent.levels},
        observation_space=spaces.Box(0, 255, FRAME, np.uint8),
        action_space=spaces.Discrete(ACTIONS),
        disable_env_checking=True,
    )
    config.env_runners(
        env_runner_cls=ProcgenRunner,
        gym_env_vectorize_mode=VectorizeMode.VECTOR_ENTRY_POINT,
        num_env_runners=agent.runners,
        num_envs_per_env_runner=agent.environments,
        rollout_fragment_length=agent.rollout,
        num_cpus_per_env_runner=1,
        num_gpus_per_env_runner=agent.gpus_per_runner,
        create_local_env_runner=agent.runners == 0,
    )
    config.learners(
        learner_class=PolicyLearner,
        num_learners=agent.learners,
        num_gpus_per_learner=agent.gpus_per_learner,
        learner_config_dict={"overlap": agent.overlap and agent.runners > 0, "threads": threads},
    )
    config.training(
        gamma=agent.discount,
        lambda_=agent.gae_lambda,
        lr=agent.lr if agent.final_lr is None else [[0, agent.lr], [agent.steps, agent.final_lr]],
        grad_clip=agent.max_grad_norm,
        grad_clip_by="global_norm",
        train_batch_size_per_learner=rows,
        minibatch_size=None if agent.minibatches == 1 else math.ceil(most / agent.minibatches),
        num_epochs=agent.epochs,
        clip_param=agent.clip,
        entropy_coeff=agent.entropy,
        vf_loss_coeff=agent.value,
        vf_clip_param=float("inf"),
        use_kl_loss=False,
        kl_coeff=0.0,
    )
    config.rl_module(
        rl_module_spec=RLModuleSpec(module_class=PolicyModule),
        model_config={"precision": agent.precision, "compile": agent.compile},
    )
    config.fault_tolerance(restart_failed_env_runners=True)
    seed = int(np.random.SeedSequence([agent.run.seed, begins_at]).generate_state(1)[0])
    config.debugging(seed=seed % 2**30, log_level="ERROR")  # RLlib passes this and larger numbers to 32-bit generators
    return config.build_algo()
