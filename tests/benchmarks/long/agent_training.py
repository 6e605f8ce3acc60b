"""An agent's training by RLlib against a hand-written proximal policy optimization, in environment steps a second.

Both have the same network, environments and settings: the published settings, except for a batch of 64 steps, so that
one measurement takes seconds. They take turns in one process, one batch each.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import ray
import torch
from torch.nn.functional import log_softmax

from concord.benchmark import Row
from concord.extras import require_extra
from concord.reinforcement.actor_critic import ActorCritic
from concord.reinforcement.agent_options import AgentConfig
from concord.training.process import tune_process

BATCHES, WARMUP = 5, 1


SETTINGS = AgentConfig().with_options(rollout=64, gpus_per_learner=float(torch.cuda.is_available()))


def loop(settings: AgentConfig) -> Callable[[], None]:
    """The hand-written loop; each call is one batch, sampled and learned from."""
    from concord.reinforcement.procgen_environment import ProcgenVectorEnv
    from concord.reinforcement.reward_scale import ScaledRewards

    network = ActorCritic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device)
    environment = ScaledRewards(ProcgenVectorEnv(settings.environments, seed=0))
    optimizer = torch.optim.Adam(network.parameters(), settings.lr, eps=1e-5)
    precision = getattr(torch, settings.precision)
    frames, _ = environment.reset()
    shape = (settings.rollout, settings.environments)
    seen = np.empty((*shape, *frames.shape[1:]), np.uint8)
    chosen = np.empty(shape, np.int64)
    values, likely, rewards = (np.empty(shape, np.float32) for _ in range(3))
    ends = np.empty(shape, np.bool_)

    def batch() -> None:
        nonlocal frames
        with torch.no_grad(), torch.autocast(device.type, precision):
            for step in range(settings.rollout):
                logits, value = network(torch.from_numpy(frames).to(device))
                scores = log_softmax(logits, 1)
                action = torch.multinomial(scores.exp(), 1)
                seen[step], chosen[step], values[step] = frames, action[:, 0].cpu(), value.cpu()
                likely[step] = scores.gather(1, action)[:, 0].cpu()
                frames, reward, ended, _, _ = environment.step(chosen[step])
                rewards[step], ends[step] = reward, ended
            last = network(torch.from_numpy(frames).to(device))[1].cpu().numpy()
        estimates, following, estimate = np.empty_like(rewards), last, np.zeros_like(last)
        for step in range(settings.rollout - 1, -1, -1):
            goes_on = settings.discount * ~ends[step]
            estimate = rewards[step] + goes_on * following - values[step] + settings.gae_lambda * goes_on * estimate
            estimates[step], following = estimate, values[step]
        normal = (estimates - estimates.mean()) / (estimates.std() + 1e-8)
        flat = [seen.reshape(-1, *frames.shape[1:]), chosen, likely, normal, estimates + values]
        columns = [torch.from_numpy(each.reshape(shape[0] * shape[1], *each.shape[2:])) for each in flat[1:]]
        pixels, (actions, before, gains, targets) = (
            torch.from_numpy(flat[0]).to(device),
            (c.to(device) for c in columns),
        )
        for _ in range(settings.epochs):
            for part in torch.randperm(len(targets), device=device).chunk(settings.minibatches):
                with torch.autocast(device.type, precision):
                    logits, value = network(pixels[part])
                scores = log_softmax(logits, 1)
                ratio = (scores.gather(1, actions[part, None])[:, 0] - before[part]).exp()
                clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
                gain = torch.min(gains[part] * ratio, gains[part] * clipped)
                entropy = -(scores.exp() * scores).sum(1)
                loss = -gain + settings.value * (value - targets[part]) ** 2 - settings.entropy * entropy
                optimizer.zero_grad()
                loss.mean().backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_grad_norm)
                optimizer.step()

    return batch


def rows() -> list[Row]:
    """Seconds for a thousand environment steps, and the ratio of environment steps a second."""
    require_extra("coinrun", "agent_training")
    from concord.reinforcement.policy_optimization import build_algorithm

    tune_process()
    torch.manual_seed(0)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", logging_level=logging.ERROR, log_to_driver=False)
    try:
        algorithm, theirs = build_algorithm(SETTINGS), loop(SETTINGS)
        thousands = SETTINGS.environments * SETTINGS.rollout / 1000
        pairs = [
            (_seconds(lambda: algorithm.step_batch(0)) / thousands, _seconds(theirs) / thousands)
            for _ in range(WARMUP + BATCHES)
        ][WARMUP:]
        algorithm.stop()
    finally:
        ray.shutdown()
    speed = statistics.median(theirs_ / ours_ for ours_, theirs_ in pairs)
    return [
        Row(
            "1000 environment steps of PPO by RLlib, 64 environments, 3 epochs",
            statistics.median(ours_ for ours_, _ in pairs),
            "a loop by hand (ratio: steps a second)",
            statistics.median(theirs_ for _, theirs_ in pairs),
            speed,
            "≥ 0.9",
        )
    ]


def _seconds(batch: Callable[[], object]) -> float:
    began = time.perf_counter()
    batch()
    return time.perf_counter() - began
