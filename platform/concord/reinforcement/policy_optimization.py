"""Proximal policy optimization by RLlib, with what makes it fast: samples that never are episodes in Python.

RLlib's own runners keep an object an episode and a list an environment, and its learner turns them back into arrays.
Here the runner (RLlib's ``EnvRunner``) steps one native vector environment and gives arrays, the learner (RLlib's
``PPOTorchLearner``, whose loss is used as it is) takes them, and the algorithm (RLlib's ``PPO``) may sample the next
batch while it learns from this one.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor

from concord.errors import RunFailedError
from concord.reinforcement.actor_critic import ActorCritic
from concord.reinforcement.agent_options import AgentConfig
from concord.reinforcement.procgen_environment import ACTIONS, ProcgenVectorEnv
from concord.reinforcement.sampling import Sampler, Samples
from concord.training.process import own_cores, tune_process

_SAMPLES = "samples"
_WEIGHTS = "weights"
_MOST_EMPTY_ROUNDS = 5  # of asking all runners in vain
_NETWORK = "network."  # how the module calls it


def _quiet() -> None:
    """RLlib warns of what it does itself, in every process."""
    for name in ("ray.rllib", "ray._common.deprecation"):
        logging.getLogger(name).setLevel(logging.ERROR)


class PolicyModule(TorchRLModule, ValueFunctionAPI):
    """The agent's network as RLlib's learner sees it; one pass gives logits and values.

    ``model_config``: ``precision``, what the network computes in (``bfloat16`` or ``float32``), and ``compile``.
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
        """The values; they came with the logits if ``embeddings`` are given."""
        return self._forward(batch)[Columns.EMBEDDINGS] if embeddings is None else embeddings


class PolicyLearner(PPOTorchLearner):
    """RLlib's learner, with the published ε of Adam."""

    def build(self) -> None:
        """Make module and optimizer; set threads and denormal numbers of this process."""
        _quiet()
        tune_process(self.config.learner_config_dict["threads"])
        super().build()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Adam with ε = 1e-5, fused where there is a GPU."""
        parameters = self.get_parameters(self._module[module_id])
        optimizer = torch.optim.Adam(parameters, eps=1e-5, fused=self._device.type == "cuda")
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=parameters, lr_or_lr_schedule=config.lr
        )


class ProcgenRunner(EnvRunner, Checkpointable):
    """Samples from one vector environment; gives :class:`Samples` instead of episodes."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        _quiet()
        super().__init__(config=config, **kwargs)
        settings = dict(config.env_config)
        remote = config.num_env_runners > 0
        tune_process(1 if remote else None)
        # One that samples where the learner is has the learner's device.
        gpus = config.num_gpus_per_env_runner if remote else config.num_gpus_per_learner * (config.num_learners == 0)
        self._device = torch.device("cuda" if gpus > 0 else "cpu")
        index = self.worker_index or 0
        self.env = ProcgenVectorEnv(config.num_envs_per_env_runner, **_for_runner(settings, config.seed or 0, index))
        self.sampler = Sampler(
            self.env,
            steps=config.rollout_fragment_length,
            discount=config.gamma,
            decay=config.lambda_,
            autocast=getattr(torch, config.model_config["precision"]),
            device=self._device,
        )
        self._weights = 0
        self.module = config.get_rl_module_spec(spaces=self.get_spaces(), inference_only=False).build().to(self._device)

    def get_spaces(self) -> dict[str, Any]:
        """What a frame and an action are."""
        frames, actions = self.env.single_observation_space, self.env.single_action_space
        return {"__env__": (frames, actions), "__env_single__": (frames, actions), DEFAULT_MODULE_ID: (frames, actions)}

    def sample(self, **_: Any) -> Samples:
        """The next steps of all environments."""
        return self.sampler.sample(self.module.network)

    def assert_healthy(self) -> None:
        """Nothing can be half made here."""

    def get_metrics(self) -> dict[str, Any]:
        """Nothing: the samples tell."""
        return {}

    def stop(self) -> None:
        """Free the games."""
        self.env.close()

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Weights, and the scale of rewards."""
        state: dict[str, Any] = {"reward_scale": _reward_scale(self)[1]}
        if self._check_component(COMPONENT_RL_MODULE, components, not_components):
            state[COMPONENT_RL_MODULE] = {DEFAULT_MODULE_ID: self.module.get_state()}
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take weights, and a scale of rewards, where they are given."""
        if "reward_scale" in state:
            scale = self.sampler.scale
            scale.count, scale.mean, scale.squares = state["reward_scale"]
        weights = state.get(COMPONENT_RL_MODULE)
        if weights is not None:
            weights = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
            self.module.set_state(weights.get(DEFAULT_MODULE_ID, weights))

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it was made from."""
        return (), {"config": self.config}


def _reward_scale(runner: ProcgenRunner) -> tuple[int, tuple[float, float, float]]:
    """The runner's number (0 samples where the learner is), and its scale of rewards."""
    scale = runner.sampler.scale
    return runner.worker_index or 0, (scale.count, scale.mean, scale.squares)


def _for_runner(settings: dict[str, Any], seed: int, index: int) -> dict[str, Any]:
    """Every runner's environments play other levels, in an order that the seed decides."""
    drawn = int(np.random.SeedSequence([seed, index, settings["begins_at"]]).generate_state(1)[0]) % (2**31 - 1)
    return {key: value for key, value in settings.items() if key != "begins_at"} | {"seed": drawn}


class PolicyOptimization(PPO):
    """PPO on arrays. ``learner_config_dict``: ``overlap``, whether the next batch is sampled while this is learned.

    With ``overlap`` the samples are of the weights before the last update; the ratio in PPO's loss is to the policy
    that sampled, so they are used rightly.

    Attributes:
        returns, lengths: of the episodes that ended in the last batch.
        batch_steps: environment steps of the last batch.
    """

    def step_batch(self, steps: int) -> dict[str, float]:
        """One batch, sampled and learned from; gives the learner's numbers, by their names in RLlib.

        Args:
            steps: environment steps so far, for schedules.
        """
        self._steps = steps
        results = self.train()[LEARNER_RESULTS][DEFAULT_MODULE_ID]
        return {name: float(value) for name, value in results.items() if isinstance(value, int | float)}

    def training_step(self) -> None:
        """Sample, learn, and send the new weights to the runners."""
        group = self.env_runner_group
        if self.config.num_env_runners == 0:
            samples = [group.local_env_runner.sample()]
        else:
            samples = self._next_samples()
            if self.config.learner_config_dict["overlap"]:
                self._begin_sampling()
        self.returns = np.concatenate([each.returns for each in samples])
        self.lengths = np.concatenate([each.lengths for each in samples])
        self.batch_steps = sum(map(len, samples))
        results = self.learner_group.update(
            batch=_batch(samples, np.random.default_rng([self.config.seed or 0, self._steps])),
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._steps + self.batch_steps},
            num_epochs=self.config.num_epochs,
            minibatch_size=self.config.minibatch_size,
            shuffle_batch_per_epoch=True,
        )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        # Runners take them when they have sampled what they are at; RLlib's own way drops weights that come meanwhile.
        self._tell_runners(wait=self.config.num_env_runners == 0 or not self.config.learner_config_dict["overlap"])

    def _tell_runners(self, wait: bool = True) -> None:
        """Send the learner's weights to all runners; without waiting until they have taken them, if that is wanted."""
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
        """The network's, by the names of its parameters."""
        state = self.learner_group.get_state(components=f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}")
        module = state[COMPONENT_LEARNER][COMPONENT_RL_MODULE][DEFAULT_MODULE_ID]
        return {name.removeprefix(_NETWORK): value for name, value in module.items()}

    def set_weights_of_network(self, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace the network's weights, in learners and runners."""
        module = {_NETWORK + name: value for name, value in weights.items()}
        self.learner_group.set_state({COMPONENT_LEARNER: {COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: module}}})
        self._tell_runners()

    def training_state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """What training goes on from: arrays (weights, Adam's moments), and counts that JSON takes."""
        state = self.learner_group.get_state()[COMPONENT_LEARNER]
        arrays = {f"weight.{name}": value for name, value in self.weights().items()}
        (optimizer,) = state[COMPONENT_OPTIMIZER].values()
        steps: dict[str, float] = {}
        for index, moments in optimizer["state"]["state"].items():
            for name, value in moments.items():
                if name == "step":
                    steps[str(index)] = float(value)
                else:
                    arrays[f"{name}.{index}"] = np.asarray(value)
        # Of the runners that live: by number, since one that has died says nothing, and comes again.
        scales = {str(number): scale for number, scale in self.env_runner_group.foreach_env_runner(_reward_scale)}
        rate = float(optimizer["state"]["param_groups"][0]["lr"])
        return arrays, {"adam_steps": steps, "lr": rate, "reward_scales": scales}

    def set_training_state(self, arrays: Mapping[str, npt.NDArray[Any]], counts: Mapping[str, Any]) -> None:
        """Go on from what :meth:`training_state` gave."""
        marked = "weight."
        self.set_weights_of_network({k.removeprefix(marked): v for k, v in arrays.items() if k.startswith(marked)})
        state = self.learner_group.get_state()[COMPONENT_LEARNER]
        ((name, optimizer),) = state[COMPONENT_OPTIMIZER].items()
        parameters = [torch.from_numpy(value) for value in self.weights().values()]

        def moment(kind: str, index: str) -> torch.Tensor:
            # In memory as its parameter is, which PyTorch's fused Adam asks for.
            return torch.empty_like(parameters[int(index)]).copy_(torch.from_numpy(arrays[f"{kind}.{index}"]))

        for group_ in optimizer["state"]["param_groups"]:
            group_["lr"] = counts["lr"]
        optimizer["state"]["state"] = {
            int(index): {
                "step": torch.tensor(step),
                "exp_avg": moment("exp_avg", index),
                "exp_avg_sq": moment("exp_avg_sq", index),
            }
            for index, step in counts["adam_steps"].items()
        }
        self.learner_group.set_state({COMPONENT_LEARNER: {COMPONENT_OPTIMIZER: {name: optimizer}}})
        scales = {int(number): tuple(scale) for number, scale in counts["reward_scales"].items()}
        if not scales:  # no runner lived
            return
        others = next(iter(scales.values()))
        self.env_runner_group.foreach_env_runner(
            lambda runner: runner.set_state({"reward_scale": scales.get(runner.worker_index or 0, others)})
        )

    def _begin_sampling(self) -> None:
        self.env_runner_group.foreach_env_runner_async("sample", tag=_SAMPLES)

    def _next_samples(self) -> list[Samples]:
        group = self.env_runner_group
        if group.num_in_flight_async_reqs(_SAMPLES) == 0:
            self._begin_sampling()
        found: list[Samples] = []
        empty = 0
        while not found or group.num_in_flight_async_reqs(_SAMPLES) > 0:
            found += [samples for _, samples in group.fetch_ready_async_reqs(tags=_SAMPLES, timeout_seconds=1.0)]
            if not found and group.num_in_flight_async_reqs(_SAMPLES) == 0:  # all runners died, and come again
                empty += 1
                if empty > _MOST_EMPTY_ROUNDS:
                    raise RunFailedError(f"sampling failed {empty} times in all runners; their logs say why")
                if group.probe_unhealthy_env_runners():
                    self._tell_runners()
                self._begin_sampling()
        return found


def _batch(samples: Sequence[Samples], generator: np.random.Generator) -> MultiAgentBatch:
    """All samples in one batch, in random order, their advantages normalized together."""

    def joined(name: str) -> Any:
        parts = [getattr(each, name) for each in samples]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    estimates = joined("advantages")
    columns = {
        Columns.OBS: joined("frames"),
        Columns.ACTIONS: joined("actions"),
        Columns.ACTION_LOGP: joined("log_probabilities"),
        Columns.ACTION_DIST_INPUTS: joined("logits"),
        Postprocessing.ADVANTAGES: (estimates - estimates.mean()) / (estimates.std() + 1e-8),
        Postprocessing.VALUE_TARGETS: joined("targets"),
    }
    # RLlib shuffles before the second pass and those after it, not before the first.
    order = generator.permutation(len(estimates))
    return MultiAgentBatch(
        {DEFAULT_MODULE_ID: SampleBatch({key: torch.from_numpy(value[order]) for key, value in columns.items()})},
        len(estimates),
    )


def build_algorithm(agent: AgentConfig, begins_at: int = 0) -> Any:
    """The :class:`PolicyOptimization` of these options.

    Args:
        agent: the options.
        begins_at: environment steps that were done before: what goes on plays other levels than what began.
    """
    rows = agent.batch // max(1, agent.learners)
    game, threads = {"game": agent.game, "difficulty": agent.difficulty}, agent.threads
    if threads is None and agent.runners + agent.learners > 0:
        threads = max(1, own_cores() - agent.runners)
    _quiet()
    config = PPOConfig(algo_class=PolicyOptimization)
    config.api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
    config.environment(
        ProcgenVectorEnv,
        env_config={**game, "levels": agent.levels, "begins_at": begins_at},
        disable_env_checking=True,
    )
    config.env_runners(
        env_runner_cls=ProcgenRunner,
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
        minibatch_size=rows // agent.minibatches,
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
    # RLlib hands it, and numbers above, to generators of 32 bits.
    config.debugging(seed=(agent.run.seed + begins_at) % 2**31, log_level="ERROR")
    return config.build_algo()
